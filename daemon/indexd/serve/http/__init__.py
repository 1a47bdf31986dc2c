"""HTTP: metrics, health, status, queries and the page, one ASGI application.

``server``      serve_http: the application on a socket that listens already
``app``         create_app: what is answered under which path
``guard``       Guard: limits, access, headers, and no error unanswered
``route``       StrictRoute: parameters are read strictly, and fast
``parameters``  what may be asked, and within which bounds
``messages``    messages by key, unique key, queue offset, time, physical offset
``figures``     status, events, both live, metrics
``problem``     ProblemError: every answer that is none
``schemas``     the answers, as OpenAPI describes them
"""
