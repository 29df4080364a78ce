"""SGLang's own server on a machine without a GPU, in an environment of its own: to see it work, and to test with it."""
