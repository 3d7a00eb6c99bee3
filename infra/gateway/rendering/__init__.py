"""Messages to token ids and back, by renderers that extend a conversation's tokens instead of rendering all of it again."""
