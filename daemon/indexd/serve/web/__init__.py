"""The page at /: searches are answered as HTML here; ``page.js`` adds what moves, where there is JavaScript.

Nothing is built and nothing comes from elsewhere. All text of the log is escaped in one place, ``config.markup``.

``wording``    numbers, sizes, times and names as people read them
``asked``      Asked: what the form says
``answer``     the answer to a search: hits, or why there are none
``message``    one message: its fields, properties and neighbours
``body``       its body as text, as JSON and as hex
``drawing``    where hits lie in time and in the log
``shell``      the page around it: head, form, and what stands there before the figures come
"""
