"""Sparse indexes: Kafka's OffsetIndex and TimeIndex, one pair per commitlog segment (spec kafka-index).

``format``        the bytes of both files, their names, the mark of what holds
``searching``     Kafka's binary search, the newest entries first
``sparse_index``  SparseIndex: what both classes share
``offset_index``  OffsetIndex: logical offset -> byte position
``time_index``    TimeIndex: timestamp -> logical offset
``kernel``        which messages get entries; compiled
``segment``       the pair of the segment that grows
``service``       SparseService: builds, seals and expires pairs
``recover``       what is kept of the pairs after a crash or a cut
``check``         the pairs held against what the frontier says of them
``compare``       the pairs held against what the log comes to
"""
