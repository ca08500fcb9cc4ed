"""An OpenAI-compatible server over one Engine, with the dashboard beside it.

``settings.py`` what an operator chooses; ``guard.py`` who may ask at all; ``protocol.py`` what may be asked;
``preparation.py`` prompts rendered and tokenized; ``bridge.py`` between the server's event loop and the engine's
thread; ``stream.py`` one request on its way; ``handlers.py`` and ``completions.py`` the endpoints; ``responses.py``
makes answers and ``shapes.py`` says what is in them; ``openapi.py`` describes it all; ``prometheus.py`` the metrics;
``server.py`` the whole.
"""
