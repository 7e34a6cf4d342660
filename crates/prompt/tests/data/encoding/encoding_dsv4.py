"""Fixed texts of nano's prompts, in the file and under the names where a DeepSeek-V4 checkpoint keeps its own.

This file is data: programs read the string constants and never execute it. The
rules that put the texts together are the family's; the wording is ours.
"""

bos_token: str = "<｜begin▁of▁sentence｜>"
eos_token: str = "<｜end▁of▁sentence｜>"
thinking_start_token: str = "<think>"
thinking_end_token: str = "</think>"
dsml_token: str = "｜DSML｜"

USER_SP_TOKEN = "<｜User｜>"
ASSISTANT_SP_TOKEN = "<｜Assistant｜>"
LATEST_REMINDER_SP_TOKEN = "<｜latest_reminder｜>"

# Placed right behind the BOS in thinking mode.
REASONING_EFFORT_LOW = ""
REASONING_EFFORT_HIGH = "Effort: high. Work through the question step by step and check the result before you answer.\n\n"
REASONING_EFFORT_MAX = (
    "Effort: maximum. Consider every reading of the question, try more than one way to the result, "
    "and check each step twice before you answer.\n\n"
)

TOOLS_TEMPLATE = """## Functions

The functions below can be called for the user. To call one, end the reply with a block like this:

<{dsml_token}tool_calls>
<{dsml_token}invoke name="NAME">
<{dsml_token}parameter name="KEY" string="true|false">VALUE</{dsml_token}parameter>
</{dsml_token}invoke>
</{dsml_token}tool_calls>

Text is written as it is, with string="true"; any other value is JSON, with string="false". Reasoning, if wanted, stands between {thinking_start_token} and {thinking_end_token}, before the block.

One function a line:

{tool_schemas}

Call no other function, and only when the request asks for it.
"""

response_format_template: str = "## Reply format\n\nThe reply is one JSON value of this schema and nothing else:\n{schema}"
