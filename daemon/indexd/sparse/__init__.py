"""Sparse indexes: Kafka's OffsetIndex and TimeIndex, one pair per commitlog segment (spec kafka-index).

``format``   the bytes of both files, their names, the mark of what holds
``kernel``   which messages get entries; compiled
``service``  SparseService: builds, seals, expires and checks pairs; what is kept of them after a crash or a cut
"""
