"""The error that ends a command in one line."""


class UserError(Exception):
  """Something the user can fix; the message is one line and names the fix.

  It may quote names and values of files: what is not printable in them, such as
  the end of a line or a terminal's control characters, is escaped.
  """

  def __init__(self, text: str):
    shown = (c if c.isprintable() else ascii(c)[1:-1] for c in text)
    super().__init__("".join(shown))
