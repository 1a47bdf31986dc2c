"""The key index: RocketMQ's IndexFile and IndexService, byte for byte (spec rocketmq-store 3 and 4).

``format``    the drawing of the file, its layout and header
``kernel``    putKey and its checks over whole batches, compiled
``file``      IndexFile: the file that is being built
``reader``    IndexFileReader: selectPhyOffset and isTimeMatched on any file, without the compiler
``check``     one file held against what the frontier says of it: check_ground, check_header, check_slots, check_kernel
"""
