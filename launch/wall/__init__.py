"""The wall: which prompts a run leaves behind; see README.md."""
