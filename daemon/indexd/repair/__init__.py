"""``indexd repair``: a broker's own index mended from its log, with the broker stopped.

An audit says what is wrong. What is sound stays as it is; for everything else new files are built beside, held against
the log once more, and put in the place of the old ones in one step that can be undone.

``plan``     which files stay, which ranges of the log get new ones, and how these are called
``build``    one range built, and all of it checked
``run``      the broker stopped, and the store a place for a repair; all of it composed, and the undo
``swap``     the folder of a repair, the exchange, the checkpoint, the way back, and the end of interrupted repairs
"""
