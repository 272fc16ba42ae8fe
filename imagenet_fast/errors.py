"""The one exception whose message is meant for the person at the terminal."""


class UserError(Exception):
    """Something the user can put right. The message is one sentence naming the path or key, then the fix.

    The CLI prints it without a traceback and exits with code 2.
    """
