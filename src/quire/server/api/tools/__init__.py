"""Tool calls and reasoning: checked in requests, forced by grammars, and parsed from outputs while they arrive.

For a request with tools, `check_tools` rejects invalid ones, `allowed_tools` returns those that the model may call,
`tool_choice_structure` returns the grammar of calls that it must make, and `forced_tools` says how to read them;
`calls_or_content` returns the grammar of calls that it may make instead of answering in a format; with
`tool_choice="none"` the template gets no tools. The text of each choice is then read by an `OutputParser` of its own.
"""
