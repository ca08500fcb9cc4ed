"""An OpenAI-compatible server over one Engine, with the dashboard beside it.

``settings.py`` what an operator chooses; ``guard.py`` who may ask at all; ``protocol.py`` what may be asked;
``bridge.py`` between the server's event loop and the engine's thread; ``handlers.py`` and ``completions.py`` the
endpoints; ``responses.py`` the shape of an answer; ``prometheus.py`` the metrics; ``server.py`` the whole.
"""
