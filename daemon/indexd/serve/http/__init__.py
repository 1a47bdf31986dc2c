"""HTTP: metrics, health, status, queries and the page, one ASGI application.

``server``      serve_http: the application on a socket that listens already
``app``         create_app: the routes, the page and the guard around them
``guard``       Guard: limits, access, headers, and no error unanswered
``endpoints``   what is answered under which path of the API
``answers``     how what was found is written as JSON
``problem``     ProblemError: every answer that is none
``api``         Api: routes with what may be asked, and their description
"""
