"""The key index: RocketMQ's IndexFile and IndexService, byte for byte (spec rocketmq-store 3 and 4).

``format``        the file's bytes, its layout and header, key hashes, flavours
``kernel``        putKey and its checks over whole batches, compiled
``file``          IndexFile, the file that is being built; IndexService, all files; a file held against the frontier
``entries``       entries and slots of a file as arrays; a file brought back to what holds of it
``reader``        IndexFileReader: selectPhyOffset and isTimeMatched on any file, without the compiler
``check_kernel``  the entries of a file held against one another; compiled
"""
