"""What plugs shardops into other people's sharding; each folder or module is the only importer of its framework."""
