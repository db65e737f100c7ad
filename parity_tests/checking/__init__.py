"""What `parity_tests.check` is made of: cases, the adapter, the call, the mistakes it can name, the result in words."""
