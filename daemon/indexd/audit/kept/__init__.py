"""Finished tasks of an audit in a file, so that one that is interrupted goes on where it was.

``parts``  which tasks still count
``lines``  the file: lines that hold or do not, one owner
``plain``  what a task came to as JSON, and back
"""
