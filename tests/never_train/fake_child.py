"""Plays the child process of a projection: does what the request's ``play`` says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

request = json.loads(Path(sys.argv[1]).read_text())
result = Path(request["result"])
OK = {"status": "ok", "plan": {"a": 1}, "program": None, "traces": [], "warnings": []}


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def play(what: str) -> None:
    if what == "ok":
        say("first line\n")
        say('PRIMUS_EXT_PROGRESS {"done": 1, "total": 3, "text": "stage 0"}\n')
        sys.stderr.write("on stderr\n")
        say('PRIMUS_EXT_PROGRESS {"done": 2, "total"\n')  # torn: two processes wrote at once
        say("no newline at the end")
        result.write_text(json.dumps(OK))
    elif what == "error":
        say("something\n")
        result.write_text(json.dumps({"status": "error", "exit_code": 2, "message": "tp=3"}))
        sys.exit(2)
    elif what == "refused":
        sys.stderr.write("loading\ntp=3 does not divide 32 heads\n\n")
        say("goodbye\n")
        left = "the program left with exit code 2 before its training entry point"
        result.write_text(json.dumps({"status": "error", "exit_code": 2, "message": left}))
    elif what == "crash":
        raise ZeroDivisionError("in the user's program")
    elif what == "killed":
        say("before the end\n")
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "background":  # holds the pipe open
        waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(request["pid_file"]).write_text(str(waiting.pid))
        result.write_text(json.dumps(OK))
    elif what == "forever":
        waiting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(request["pid_file"]).write_text(f"{os.getpid()} {waiting.pid}")
        say("PRIMUS_EXT_PROGRESS " + json.dumps({"done": 0, "total": 1, "text": "ready"}) + "\n")
        time.sleep(600)
    elif what == "environment":
        result.write_text(json.dumps({**OK, "plan": dict(os.environ)}))


play(request["play"])
