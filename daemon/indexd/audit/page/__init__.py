"""An audit as one HTML page that needs nothing else.

``page``    the page: verdict, strip, sections
``tables``  holes, findings and index files
``rest``    the other sections
``strip``   the log drawn
``bands``   the index files below it
``scale``   where an offset lies on that drawing, and when it was stored
"""
