"""The Responses API, with stored responses."""
