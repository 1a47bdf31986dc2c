"""HTTP: metrics, health, status, queries and the page, one ASGI application.

``server``      serve_http: the application on a socket that listens already, with bounds on what clients keep waiting
``guard``       Guard: who may ask, headers, and no error unanswered; ProblemError: every answer that is none
``endpoints``   what is answered under which path of the API, with parameters and description
``answers``     how what was found is written as JSON
"""
