"""Short dialogues in plain English, on which `tiny-chat` is trained, and the forms that judge it."""
