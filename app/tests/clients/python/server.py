"""The server that the clients are tried on: on a free port, with a home of its own."""

import atexit
import os
import subprocess
import tempfile

MODEL = "tales"
QUESTION = "Tell me a story about a shy fox who lost a key"


def start(*arguments):
    """Starts a server that ends with this program; returns its address."""
    home = tempfile.TemporaryDirectory()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PAGURO_", "XDG_"))}
    environment["HOME"] = home.name
    command = [os.environ["PAGURO_BINARY"], "serve", "--port", "0", "--log", "warn", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith("listening at http://"), line

    def stop():
        process.terminate()
        process.wait(20)
        home.cleanup()

    atexit.register(stop)
    return line.removeprefix("listening at ").strip()


# One for all clients.
ADDRESS = start()
