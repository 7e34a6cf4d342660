//! Where the values of a step live: a few slots, each reused as soon as its value has been read for the last time. The
//! sum of the slots is the activation memory of the step, known before it runs.

use crate::step::{Element, Node, NodeId, Value, ValueId};

/// A piece of a step's memory; an index into [`MemoryPlan::slots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// A buffer that holds one value after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    pub element: Element,
    /// Elements of the largest value it ever holds.
    pub elements: usize,
}

/// Slots, and the slot of each value.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    slots: Vec<Slot>,
    slot_of: Vec<SlotId>,
}

impl MemoryPlan {
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub fn slot_of(&self, value: ValueId) -> SlotId {
        self.slot_of[value.0 as usize]
    }

    /// Bytes of all slots: the peak activation memory of the step. Both element types have 4 bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.slots.iter().map(|slot| slot.elements as u64 * 4).sum()
    }
}

/// Who has used a slot since its current value was written.
#[derive(Clone, Debug, Default)]
struct SlotUse {
    writer: Option<NodeId>,
    readers: Vec<NodeId>,
    free: bool,
}

/// Assigns slots in execution order, best fit first, and lists for each node the nodes that must precede it because of
/// values and memory. `kept` values keep their slot to the end.
pub(crate) fn plan(
    nodes: &[Node],
    values: &[Value],
    kept: impl Iterator<Item = ValueId>,
) -> (MemoryPlan, Vec<Vec<NodeId>>) {
    let last_use = last_uses(nodes, values.len(), kept);
    let mut slots: Vec<Slot> = Vec::new();
    let mut uses: Vec<SlotUse> = Vec::new();
    let mut slot_of: Vec<Option<SlotId>> = vec![None; values.len()];
    let mut predecessors: Vec<Vec<NodeId>> = vec![Vec::new(); nodes.len()];

    for (index, node) in nodes.iter().enumerate() {
        let id = NodeId(index as u32);
        let before = &mut predecessors[index];
        let shared = node.op.in_place(node.inputs.len());
        for input in &node.inputs {
            let slot =
                slot_of[input.0 as usize].unwrap_or_else(|| panic!("node {index} reads a value nobody produced"));
            let slot_use = &mut uses[slot.0 as usize];
            before.extend(slot_use.writer.filter(|writer| *writer != id));
            slot_use.readers.push(id);
        }
        for (position, output) in node.outputs.iter().enumerate() {
            assert!(slot_of[output.0 as usize].is_none(), "node {index} produces a value that exists already");
            let value = values[output.0 as usize];
            let slot = match shared {
                Some((input, shared_output)) if shared_output == position => {
                    let input = node.inputs[input];
                    assert_eq!(
                        last_use[input.0 as usize],
                        LastUse::At(index),
                        "node {index} ({}) overwrites a value that is used later",
                        node.op.name()
                    );
                    slot_of[input.0 as usize].expect("checked above")
                }
                _ => take_slot(&mut slots, &mut uses, value),
            };
            let slot_use = &mut uses[slot.0 as usize];
            before.extend(slot_use.writer.filter(|writer| *writer != id));
            before.extend(slot_use.readers.drain(..).filter(|reader| *reader != id));
            *slot_use = SlotUse { writer: Some(id), readers: Vec::new(), free: false };
            slot_of[output.0 as usize] = Some(slot);
        }
        let overwritten = shared.map(|(input, _)| node.inputs[input]);
        for value in node.inputs.iter().chain(&node.outputs) {
            if last_use[value.0 as usize] == LastUse::At(index) && Some(*value) != overwritten {
                uses[slot_of[value.0 as usize].expect("assigned above").0 as usize].free = true;
            }
        }
    }
    let slot_of = slot_of.into_iter().map(|slot| slot.expect("every value has a producer")).collect();
    (MemoryPlan { slots, slot_of }, predecessors)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LastUse {
    /// Node that reads it last, or produces it if nobody reads it.
    At(usize),
    /// Kept after the step.
    Never,
}

fn last_uses(nodes: &[Node], num_values: usize, kept: impl Iterator<Item = ValueId>) -> Vec<LastUse> {
    let mut last_use = vec![LastUse::At(0); num_values];
    for (index, node) in nodes.iter().enumerate() {
        for value in node.inputs.iter().chain(&node.outputs) {
            last_use[value.0 as usize] = LastUse::At(index);
        }
    }
    for value in kept {
        last_use[value.0 as usize] = LastUse::Never;
    }
    last_use
}

/// The smallest free slot that is large enough; else the largest free one, grown; else a new one.
fn take_slot(slots: &mut Vec<Slot>, uses: &mut Vec<SlotUse>, value: Value) -> SlotId {
    let fits = |slot: &Slot| slot.elements >= value.len();
    let free = slots.iter().enumerate().filter(|(i, slot)| uses[*i].free && slot.element == value.element);
    let best = free.min_by_key(|(i, slot)| {
        let distance = if fits(slot) { slot.elements } else { usize::MAX - slot.elements };
        (!fits(slot), distance, *i)
    });
    if let Some((index, _)) = best {
        slots[index].elements = slots[index].elements.max(value.len());
        return SlotId(index as u32);
    }
    slots.push(Slot { element: value.element, elements: value.len() });
    uses.push(SlotUse::default());
    SlotId(slots.len() as u32 - 1)
}
