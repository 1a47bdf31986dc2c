"""HTTP: metrics, health, status, queries and the page, one ASGI application.

``server``      serve_http: the application on a socket that listens already
``connection``  Connection: bounds on what a client may keep waiting
``app``         create_app: what is answered under which path
``guard``       Guard: limits, access, headers, and no error unanswered
``access``      Access: token, certificate, origins, names
``route``       StrictRoute: parameters are read strictly, and fast
``parameters``  what may be asked, and within which bounds
``messages``    messages by key, unique key, queue offset, time, physical offset
``files``       index files, coverage, recovery, frontier
``health``      is it alive, is it ready
``figures``     status, events, both live, metrics
``page``        the page
``queries``     Queries: questions to the data directory, answered or a problem
``answers``     what was found, as JSON
``bodies``      bodies, as they were asked for
``problem``     ProblemError: every answer that is none
``schemas``     the answers, as OpenAPI describes them
``documented``  how a route's answers are described there
"""
