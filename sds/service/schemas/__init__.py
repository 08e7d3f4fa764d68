"""The JSON of every answer, as types. /openapi.json describes each as a schema of the same name, from which clients are made.

Nothing is read or written through these types: `tests.service.testbed` checks every answer that a test gets against them. A key
that is `NotRequired` may be absent; a value that may be null says so. Times that end in `_ms` are milliseconds since 1970, amounts
are minor units (cents), hashes are 64 hexadecimal digits.
"""
