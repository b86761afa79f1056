"""What all tests share."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the suite in the background has it ignored, and the tests of Ctrl-C need the usual.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    # nohup, likewise.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
