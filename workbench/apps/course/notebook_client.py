"""A client that runs a notebook and misses no reply.

The client of nbclient waits for the reply to a cell on an asynchronous socket, and sends what an `Output` widget shows
on the same socket behind its back. A reply that arrives in between raises no further event, so the client waits until
its time limit.
"""

from __future__ import annotations

from typing import Any

import zmq
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget
from nbformat import NotebookNode

QUIET = ["--log-level=ERROR"]
"""A kernel warns that its connection is not encrypted; it never leaves this machine."""


class WakingOutput(OutputWidget):
    """The client's side of an `Output` widget."""

    def send(self, *args: Any, **kwargs: Any) -> None:
        """Send a message of the widget, and let the socket look for a reply that arrived meanwhile."""
        super().send(*args, **kwargs)
        self.kernel_client.shell_channel.socket.get(zmq.EVENTS)


def notebook_client(notebook: NotebookNode, **options: Any) -> NotebookClient:
    """A client that runs ``notebook``.

    Args:
        notebook: Its cells get the outputs.
        options: Those of nbclient's client, such as ``timeout``, the maximum time of a cell in seconds.
    """
    client = NotebookClient(notebook, extra_arguments=QUIET, **options)
    client.widget_registry["@jupyter-widgets/output"]["OutputModel"] = WakingOutput
    return client
