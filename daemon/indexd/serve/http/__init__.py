"""HTTP: metrics, health, status, queries and the page, one ASGI application.

``server``   serve_http: the application on a socket that listens already
"""
