"""The page at /: searches are answered as HTML here; ``page.js`` adds what moves, where there is JavaScript.

Nothing is built and nothing comes from elsewhere. All text of the log is escaped by the templates.

``search_form``  SearchForm: what is asked
``answer``       the answer to a search: hits, a message, or why there are none
``page``         the page around it, and the templates' environment
"""
