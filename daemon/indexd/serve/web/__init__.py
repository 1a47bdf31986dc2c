"""The page at /: searches are answered as HTML here; ``page.js`` adds what moves, where there is JavaScript.

Nothing is built and nothing comes from elsewhere. All text of the log is escaped by the templates.

``page``  SearchForm, what is asked; the answer to it; the page around both
"""
