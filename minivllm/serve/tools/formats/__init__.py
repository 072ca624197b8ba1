"""The formats in which models write tool calls, each a file and a row of TOOL_PARSERS."""
