"""The sharded tensor: which elements a rank has, and what functions of torch do with them."""
