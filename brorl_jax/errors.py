"""The error that ends a command in one line."""


class UserError(Exception):
  """Something the user can fix; the message is one line and names the fix."""
