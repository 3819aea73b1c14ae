"""What several APIs share: fields of request and response bodies, sampling parameters, and outputs."""
