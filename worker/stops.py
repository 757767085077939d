"""Stop sequences in a text that comes in pieces. Knows strings only, no tokens and no sessions."""

from collections import deque


class StopMatcher:
    """Finds the first stop sequence of one generation's text and holds back what may become one.

    The first is the one that ends first; of those that end at the same character, the longest. It depends
    on the text alone, not on how it is cut into pushes, and needs no text after it. Characters are code
    points.

    An automaton of Aho and Corasick ("Efficient string matching", CACM 1975) takes a step per character:
    its state is the longest end of the text that is a beginning of some sequence, so the work is linear
    in the text whatever the sequences are.

    Args:
        sequences: What to look for.

    Raises:
        ValueError: A sequence is empty.
    """

    def __init__(self, sequences: tuple[str, ...]) -> None:
        if "" in sequences:
            raise ValueError(f"stop sequence {sequences.index('')} is empty")
        # A node is a beginning of a sequence; 0 is the empty one.
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # the node of the longest proper end of this node's text
        self._num_held = [0]  # length of the longest end that is a proper beginning of a sequence
        self._met: list[str | None] = [None]  # the longest sequence that this node's text ends with
        for sequence in sequences:
            self._insert(sequence)
        self._link()
        self._node = 0
        self._held = ""
        self._is_met = False

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take the next text.

        Args:
            text: What follows the text so far; may be empty.
            may_stop: Whether a sequence that ends within `text` counts. One that began before, in text
                that may not stop, counts if it ends in text that may.

        Returns:
            Text that is certain now, and the stop sequence that was met, if any: then the text ends before
            it and the rest of `text` is lost.

        Raises:
            RuntimeError: A stop sequence was met before.
        """
        if self._is_met:
            raise RuntimeError("text after the stop sequence")
        if len(self._children) == 1:
            return text, None
        for index, character in enumerate(text):
            self._node = self._next(self._node, character)
            met = self._met[self._node]
            if may_stop and met is not None:
                whole = self._held + text[: index + 1]
                self._held = ""
                self._is_met = True
                return whole[: len(whole) - len(met)], met
        whole = self._held + text
        certain = len(whole) - self._num_held[self._node]
        self._held = whole[certain:]
        return whole[:certain], None

    def finish(self) -> str:
        """End the text; returns what was held back and never became a stop, empty after one was met."""
        held, self._held = self._held, ""
        return held

    def _next(self, node: int, character: str) -> int:
        while node and character not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(character, 0)

    def _insert(self, sequence: str) -> None:
        node = 0
        for depth, character in enumerate(sequence):
            children = self._children[node]
            # The node has a child, so its text is a proper beginning.
            self._num_held[node] = depth
            if character not in children:
                children[character] = len(self._children)
                self._children.append({})
                self._fallback.append(0)
                self._num_held.append(0)
                self._met.append(None)
            node = children[character]
        self._met[node] = sequence

    def _link(self) -> None:
        # Breadth first: a fallback is shorter than its node, so it is complete when it is needed.
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            fallback = self._fallback[node]
            if not self._children[node]:
                self._num_held[node] = self._num_held[fallback]
            if self._met[node] is None:
                self._met[node] = self._met[fallback]
            for character, child in self._children[node].items():
                self._fallback[child] = self._next(fallback, character)
                queue.append(child)
