"""One engine a file: each makes a policy's decisions true in its own way."""
