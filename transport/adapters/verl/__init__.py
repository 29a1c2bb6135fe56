"""Adapter to verl: `engine` registers "payload_transport", `manager` runs updates over it, `data` is for DataProto."""
