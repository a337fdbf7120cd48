"""Between text and tokens: chat templates, and the token that pads."""
