"""From a batch to durable files, in one order: files, then checkpoint, then frontier (ARCHITECTURE.md, decision 5).

``frontier``  per output the files and entry counts that are durable, and the physical offset they cover
``pipeline``  all outputs of one data directory, and which there are: build, mark, make durable, write down; whether the
              log still is what was built from
"""
