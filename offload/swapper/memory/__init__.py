"""Host and device memory of fixed size, the device's streams, and the pager's lock."""
