"""A notebook's client sees a reply that arrives while it sends a message of an `Output` widget."""

import asyncio
import importlib.util
import select
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import nbformat
import zmq
import zmq.asyncio
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.session import Session
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget

from workbench.apps.course.notebook_client import WakingOutput, notebook_client


async def reply_while_sending(output_class):
    """The reply that a client gets if it arrives after the client's look at the socket, before it sends a message."""
    session, context = Session(key=b"key"), zmq.asyncio.Context()
    kernel, socket = zmq.Context.shadow(context.underlying).socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        port = kernel.bind_to_random_port("tcp://127.0.0.1")
        socket.connect(f"tcp://127.0.0.1:{port}")
        channel = AsyncZMQSocketChannel(socket, session, asyncio.get_running_loop())
        channel.send(session.msg("execute_request"))
        assert kernel.poll(60_000)
        identity, *_ = kernel.recv_multipart()
        waiting = asyncio.ensure_future(channel.get_msg(timeout=None))
        for _ in range(3):
            await asyncio.sleep(0.01)  # the client waits, and its loop has looked at the socket
        session.send(kernel, "execute_reply", ident=identity)
        assert select.select([socket.fd], [], [], 60)[0]
        time.sleep(0.01)  # ZeroMQ does not look twice within a millisecond
        widget = output_class("id", {"outputs": []}, SimpleNamespace(session=session, shell_channel=channel), None)
        widget.parent_header = {}
        widget.sync_state()
        assert kernel.poll(60_000), "the message did not arrive"
        done, _ = await asyncio.wait([waiting], timeout=60 if output_class is WakingOutput else 0.2)
        return done.pop().result() if done else waiting.cancel() and None
    finally:
        kernel.close(linger=0)
        context.destroy(linger=0)


def run(coroutine):
    """Its result, from another thread: a test of a browser may have left a running loop in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def test_a_reply_that_arrives_while_a_message_is_sent_is_seen():
    reply = run(reply_while_sending(WakingOutput))
    assert reply["msg_type"] == "execute_reply"


def test_nbclients_own_class_misses_it():
    """If it no longer does, `notebook_client` has become superfluous."""
    assert run(reply_while_sending(OutputWidget)) is None


def opened_by(client):
    """The client's side of an `Output` widget that a kernel has opened."""
    state = {"_model_module": "@jupyter-widgets/output", "_model_name": "OutputModel", "outputs": []}
    return client.on_comm_open_jupyter_widget({"content": {"comm_id": "1", "data": {"state": state}}})


def test_slides_and_notebooks_in_tests_have_the_other_class():
    notebook = nbformat.v4.new_notebook()
    assert type(opened_by(notebook_client(notebook))) is WakingOutput
    path = Path(__file__).parents[2] / "notebooks/conftest.py"
    spec = importlib.util.spec_from_file_location("notebooks_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    call = module.pytest_runtest_call(None)
    next(call)
    assert type(opened_by(NotebookClient(notebook))) is WakingOutput
    call.close()
    assert type(opened_by(NotebookClient(notebook))) is OutputWidget
