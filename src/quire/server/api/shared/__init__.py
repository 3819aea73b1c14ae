"""The bodies of requests and answers, as structs: what is decoded, encoded and described in /openapi.json."""
