"""Values that are no arrays: text, bytes, and anything nested, as bytes of a payload and back. docs/PAYLOADS.md."""
