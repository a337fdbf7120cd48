"""An agent program: it spells words backward, and tries again if a tool finds that letters are missing."""


def letters(text: str) -> list[str]:
    """The tool: the letters of a text, sorted."""
    return sorted(character for character in text.lower() if character.isalpha())


async def agent(client, row):
    word = row["question"].split()[-1]
    messages = [{"role": "user", "content": row["question"]}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=12)
        answer = reply.choices[0].message.content or ""
        if letters(answer) == letters(word):
            break
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": row["question"]}]
    return answer
