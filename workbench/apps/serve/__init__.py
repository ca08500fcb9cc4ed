"""An OpenAI-compatible server over one Engine, with the dashboard beside it.

In the order in which a request passes them: ``server.py`` (sockets and routes), ``settings.py`` (address, access and
limits), ``guard.py`` (Host, Origin, API key, size of the body), ``handlers.py`` and ``completions.py`` (the endpoints),
``protocol.py`` (request bodies), ``conversation.py`` (messages and their text), ``preparation.py`` (the threads that
render and tokenize), ``bridge.py`` (between the server's event loop and the engine's thread), ``stream.py`` (one
request's new tokens), ``responses.py`` (answers) and ``shapes.py`` (types of answers).
``openapi.py`` describes the API, ``prometheus.py`` makes the metrics, ``errors.py`` the errors.
"""
