"""Makes a virtual environment and installs into it; the Makefile calls this, people call make.

    PYTHON tools/environment.py PYTHON ENVIRONMENT CONSTRAINTS PIP_ARGUMENT...

PYTHON is the interpreter as the user named it, for messages; the environment is made with the one
that runs this. An installation that was killed leaves a half-written environment, which may look
whole: ENVIRONMENT.lock is therefore not empty from the start of an installation to its end, and an
installation that finds it so starts from an empty environment. The file is locked as well, so that
two calls of make do not install into one environment at once.

The exit status is that of pip, 128 plus the signal's number if pip was killed, or 1 with a message.
"""
# Any Python may be named, an old one too: this file has to be read by it before it can be refused.
# ruff: noqa: RUF005, UP031

import glob
import os
import platform
import subprocess
import sys

OLDEST, NEWEST = (3, 10), (3, 13)
NUMPY_2_ONLY = (3, 13)  # numpy 1, which constraints.txt pins, has no wheel for it


def check_python(name):
    """Exits with what to do if this Python cannot make the environment."""
    version = tuple(sys.version_info[:2])
    if not OLDEST <= version <= NEWEST:
        sys.exit(
            "%s is Python %d.%d, but Python 3.10 to 3.13 is needed. Install one, or name one: "
            "make PYTHON=/path/to/python3.11" % ((name,) + version)
        )
    if sys.platform == "darwin" and platform.machine() == "x86_64":
        sys.exit(
            "PyTorch has no wheel of 2.3 or newer for Intel Macs, and Opacus 1.6 needs one. "
            "The core alone installs there: pip install ."
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        sys.exit(
            "%s has no venv module. On Debian and Ubuntu: apt install python%d.%d-venv"
            % ((name,) + version)
        )


def say(text):
    """Prints at once: what pip prints comes after it."""
    print(text)
    sys.stdout.flush()


def wait_for(lock, environment):
    """Waits until no other installation into the environment runs."""
    import fcntl

    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("Waiting for another installation into " + environment)
        fcntl.flock(lock, fcntl.LOCK_EX)


def mark(lock, text):
    """Replaces what the lock file says; it stays locked."""
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()


def succeeds(command):
    """Whether a command exists and ends with 0; what it prints is dropped."""
    try:
        with open(os.devnull, "w") as nowhere:
            return subprocess.call(command, stdout=nowhere, stderr=nowhere) == 0
    except OSError:
        return False


def install(name, environment, constraints, arguments):
    """Installs, in an environment that is made if there is none or if it is unfinished.

    Returns:
        The exit status.
    """
    python = os.path.join(environment, "bin", "python")
    with open(environment + ".lock", "a+") as lock:
        wait_for(lock, environment)
        if os.fstat(lock.fileno()).st_size or not succeeds([python, "-m", "pip", "--version"]):
            say("Making %s with %s" % (environment, name))
            mark(lock, "unfinished\n")
            if subprocess.call([sys.executable, "-m", "venv", "--clear", environment]):
                return 1
        mark(lock, "unfinished\n")
        for stamp in glob.glob(os.path.join(environment, ".*-installed")):
            os.remove(stamp)
        if succeeds(
            [python, "-c", "import sys; sys.exit(sys.version_info < %r)" % (NUMPY_2_ONLY,)]
        ):
            constraints = "constraints-numpy2.txt"
        command = [python, "-m", "pip", "install", "--disable-pip-version-check"]
        command += ["-c", constraints] + arguments
        say(" ".join(command))
        # pip holds the lock too: it may outlive this process, if that alone is killed.
        status = subprocess.call(command, pass_fds=[lock.fileno()])
        if 0 <= status < 128:  # pip ended by itself: what it did not install, it has not begun
            mark(lock, "")
        return status if status >= 0 else 128 - status


if __name__ == "__main__":
    check_python(sys.argv[1])
    try:
        sys.exit(install(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
    except KeyboardInterrupt:
        sys.exit(130)
