"""Sparse indexes: Kafka's OffsetIndex and TimeIndex, one pair per commitlog segment (spec kafka-index).

``format``        the bytes of both files, their names, the mark of what holds
``sparse_index``  OffsetIndex and TimeIndex over one base, SparseIndex
``kernel``        which messages get entries; compiled
``service``       SparseService: builds, seals and expires pairs
``recover``       what is kept of the pairs after a crash or a cut
``check``         the pairs held against what the frontier says of them
"""
