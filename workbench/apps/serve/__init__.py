"""An OpenAI-compatible server over one Engine, with the dashboard beside it.

In the order in which a request passes them:

- ``server.py`` puts the parts together, with ``settings.py``; ``listener.py``, ``sockets.py`` and ``fair_loop.py``
  accept connections and bound what each may cost.
- ``guard.py`` checks Host, Origin (``cross_origin.py``), key (``keys.py``) and size before any handler.
- ``handlers.py``, ``completions.py`` and ``trace_stream.py`` are the endpoints; ``dashboard.py`` and
  ``dashboard_socket.py`` the page and its websocket.
- ``protocol.py`` reads bodies, with ``conversation.py`` (messages), ``tools.py`` (calls of tools) and ``structured.py``
  (the form of an answer); ``preparation.py`` renders and tokenizes them beside the event loop.
- ``call_parts.py`` describes a form of calls, which ``call_probes.py`` learns from a template; ``known_forms.py`` has
  those that a template leaves out, ``given_tools.py`` the variable that tells it about tools. ``call_forms.py`` and
  ``pair_rules.py`` make the grammar of a form, ``tools.py`` and ``pair_reader.py`` read the answer by it.
- ``bridge.py`` stands between the event loop and the engine's thread; ``stream.py`` is one request's new tokens.
- ``responses.py`` makes answers, ``shapes.py`` are their types, ``errors.py`` the errors.

Beside these: ``openapi.py`` describes the API, ``prometheus.py`` makes the metrics, ``access_log.py`` and
``log_limit.py`` write the logs, ``exposure.py`` is the text of ``--check``, ``priority.py`` orders threads.
"""
