//! Fusion: rules that replace nodes by fewer ones with equal bits. A rule looks at the nodes from one on, and returns the number of
//! nodes that it replaces and the new ones.

use paguro_backend::Linear;

use super::{
    List,
    facts::Facts,
    kernels,
    node::{
        Activate, Acts, AddBranch, Epilogue, ExpertMatmul, Input, Kernel, Matmul, Node, NormRows, Places,
        RopeStore, RowClass, Span,
    },
    slot::Slot,
};
use crate::{
    heads::is_plain,
    layout::{BLOCK, Layout},
    matrix::Order,
};

/// A rule: the facts, the class of rows, and the nodes from one on.
type Rule = fn(&Facts<'_>, RowClass, &[Node]) -> Option<(usize, Vec<Node>)>;

/// All rules, in order.
const RULES: [Rule; 16] = [
    add_directly,
    replaced_once,
    scale_sum,
    norm_sum,
    order_pairs,
    order_gates,
    order_experts,
    rope_in_matmul,
    gate_in_matmul,
    gate_in_coop,
    activation_in_coop,
    gate_in_experts,
    choice_in_experts,
    sum_in_experts,
    norm_experts,
    norm_in_matmul,
];

/// Applies all rules.
pub fn fuse(facts: &Facts<'_>, list: &mut List) {
    for rule in RULES {
        list.body = apply(facts, list.class, rule, &list.body);
    }
    end(facts, list);
}

/// Applies a rule wherever it matches.
fn apply(facts: &Facts<'_>, class: RowClass, rule: Rule, nodes: &[Node]) -> Vec<Node> {
    let mut nodes = nodes.to_vec();
    let mut at = 0;
    while at < nodes.len() {
        while let Some((count, fused)) = rule(facts, class, &nodes[at..]) {
            nodes.splice(at..at + count, fused);
        }
        at += 1;
    }
    nodes
}

/// A branch that a matmul or the experts compute and that is added unchanged: the matmul adds it.
fn add_directly(_: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [first, Node { kernel: Kernel::AddBranch(add), .. }, ..] = nodes else { return None };
    let AddBranch { from: Some(Slot::Branch), to: Slot::Stream, post_norm: None, scale, out_scale, .. } =
        *add
    else {
        return None;
    };
    if out_scale != 1.0 {
        return None;
    }
    let kernel = match &first.kernel {
        Kernel::Matmul(op) if op.out.slot == Slot::Branch => {
            let mut op = op.clone();
            (op.out.slot, op.epilogue) = (Slot::Stream, Epilogue::Add(scale));
            Kernel::Matmul(op)
        }
        Kernel::AddExperts(op) if op.out == Slot::Branch => {
            let mut op = *op;
            (op.out, op.adds) = (Slot::Stream, Some(scale));
            Kernel::AddExperts(op)
        }
        _ => return None,
    };
    Some((2, vec![Node::new(kernel)]))
}

/// A norm that replaces rows of the stream, and these rows as activations: the norm has written them.
fn replaced_once(_: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [first, Node { kernel: Kernel::Norm(norm), .. }, ..] = nodes else { return None };
    let replaces = matches!(&first.kernel, Kernel::Norm(norm) if norm.replaces);
    (replaces && norm.norm.is_none() && is_fresh(norm)).then(|| (2, vec![first.clone()]))
}

/// Returns the norm of a branch that the next norm can add to the stream, and the factor of the sum.
fn pending(node: &Node) -> Option<(paguro_backend::Norm, f32)> {
    let Kernel::AddBranch(AddBranch { from, to, post_norm: Some(norm), scale, out_scale, writes }) =
        node.kernel
    else {
        return None;
    };
    let is_pending = from == Some(Slot::Branch) && to == Slot::Stream && is_plain(&norm) && scale == 1.0;
    (is_pending && !writes).then_some((norm, out_scale))
}

/// A normed branch, and a scale of the stream: one addition.
fn scale_sum(_: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [first, second, ..] = nodes else { return None };
    pending(first)?;
    let Kernel::AddBranch(AddBranch { from: None, out_scale, .. }) = second.kernel else { return None };
    let Kernel::AddBranch(add) = first.kernel else { return None };
    let add = AddBranch { out_scale: add.out_scale * out_scale, ..add };
    Some((2, vec![Node::new(Kernel::AddBranch(add))]))
}

/// A normed branch, and the norm of the stream: the norm adds it.
fn norm_sum(_: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [first, Node { kernel: Kernel::Norm(norm), .. }, ..] = nodes else { return None };
    let adds = Some(pending(first)?);
    is_fresh(norm).then(|| (2, vec![Node::new(Kernel::Norm(NormRows { adds, ..norm.clone() }))]))
}

/// Returns true for a norm of the stream to which nothing is added, and which stays as it is.
fn is_fresh(norm: &NormRows) -> bool {
    norm.rows.slot == Slot::Stream
        && norm.acts == Acts::Normed
        && norm.adds.is_none()
        && norm.sums.is_none()
        && !norm.replaces
}

/// The sum of experts, and the norm of the stream: the norm adds it.
fn norm_experts(_: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [Node { kernel: Kernel::AddExperts(sum), .. }, Node { kernel: Kernel::Norm(norm), .. }, ..] = nodes
    else {
        return None;
    };
    let sums = Some(*sum).filter(|sum| sum.adds.is_some());
    (sums.is_some() && is_fresh(norm))
        .then(|| (2, vec![Node::new(Kernel::Norm(NormRows { sums, ..norm.clone() }))]))
}

/// Returns the number of matmuls of queries, keys and values before their rotation.
fn heads(nodes: &[Node]) -> Option<(usize, &RopeStore)> {
    let count = nodes.iter().take_while(|node| matmul(node).is_some()).count();
    let Kernel::RopeStore(op) = &nodes.get(count)?.kernel else { return None };
    let is_own = |linear: &Linear| op.linears.iter().flatten().any(|own| own.matrix == linear.matrix);
    let all = nodes[..count].iter().filter_map(matmul).all(|matmul| matmul.linears.iter().all(is_own));
    (count > 0 && all).then_some((count, op))
}

fn matmul(node: &Node) -> Option<&Matmul> {
    match &node.kernel {
        Kernel::Matmul(op) => Some(op),
        _ => None,
    }
}

/// Matmuls of heads that steps of one row rotate themselves write the ends of neighbouring pairs together, in all steps.
fn order_pairs(facts: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let (count, rope) = heads(nodes)?;
    let pairs = facts.pairs(rope.rope);
    if rope.is_together || !facts.rotates_in_matmul(rope) || !facts.is_split(rope.rope) || pairs == 0 {
        return None;
    }
    let head_dim = facts.group(rope.kv).head_dim;
    let is_rotated =
        |linear: &Linear| rope.linears[..2].iter().flatten().any(|own| own.matrix == linear.matrix);
    let ordered = |op: &Matmul| {
        let matrices = op.linears.iter().filter(|linear| is_rotated(linear)).count();
        let order = Order::Together { matrices, head_dim, pairs };
        Node::new(Kernel::Matmul(Matmul { order, ..op.clone() }))
    };
    let mut fused: Vec<_> = nodes[..count].iter().filter_map(matmul).map(ordered).collect();
    fused.push(Node::new(Kernel::RopeStore(Box::new(RopeStore { is_together: true, ..rope.clone() }))));
    Some((count + 1, fused))
}

/// One row: matmuls of heads rotate their results, and store them.
fn rope_in_matmul(facts: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let (count, rope) = heads(nodes)?;
    if !class.is_one() || !facts.rotates_in_matmul(rope) {
        return None;
    }
    let rotates = |op: &Matmul| {
        let epilogue = Epilogue::Rope(Box::new(rope.clone()));
        Node::new(Kernel::Matmul(Matmul { epilogue, ..op.clone() }))
    };
    Some((count + 1, nodes[..count].iter().filter_map(matmul).map(rotates).collect()))
}

/// A matmul of gates and inputs, their activation, and the matmul that reads it.
fn network(nodes: &[Node]) -> Option<(&Matmul, &Activate, &Matmul)> {
    let [
        Node { kernel: Kernel::Matmul(gates), .. },
        Node { kernel: Kernel::Activate(activate), .. },
        Node { kernel: Kernel::Matmul(down), .. },
        ..,
    ] = nodes
    else {
        return None;
    };
    let is_own = activate.gate.is_some_and(|gate| gate.slot == gates.out.slot);
    (is_own && matches!(activate.places, Places::Rows)).then_some((gates, activate, down))
}

/// Returns true if a matmul can compute the activations of the next one in a step of one row.
fn can_gate(facts: &Facts<'_>, gates: &Matmul, width: usize, down: &Matmul) -> bool {
    // A launch cannot read activations that it writes.
    gates.acts != down.acts
        && width.is_multiple_of(BLOCK)
        && facts.is_whole(&gates.linears)
        && facts.is_whole(&down.linears)
        && kernels::has_room(&facts.target, facts.layout(down.linears[0].matrix), width / BLOCK)
}

/// Gate and up whose activation another rule fuses: their rows alternate, in all steps.
fn order_gates(facts: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let (gates, activate, down) = network(nodes)?;
    let is_both = gates.linears.len() == 2 && activate.up.slot == gates.out.slot && !activate.in_turn;
    if !is_both || !can_gate(facts, gates, activate.width, down) {
        return None;
    }
    let layouts = [gates, down].map(|op| facts.layout(op.linears[0].matrix));
    let few = match facts.target.cooperative {
        Some(_) if !layouts.contains(&Layout::F32) => layouts.map(kernels::few_rows).into_iter().max(),
        _ => None,
    };
    let gates = Matmul { order: Order::InTurn, few: few.unwrap_or(0), ..gates.clone() };
    let mut activate = *activate;
    (activate.in_turn, activate.up.first) = (true, gates.out.first + 1);
    Some((2, vec![Node::new(Kernel::Matmul(gates)), Node::new(Kernel::Activate(activate))]))
}

/// One row: the matmul of gates computes the activation, in floats, which the next matmul quantizes.
fn gate_in_matmul(facts: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let (gates, activate, down) = network(nodes)?;
    if !class.is_one() {
        return None;
    }
    let epilogue = match gates.linears.len() {
        2 if activate.in_turn => Epilogue::Gate(activate.activation),
        1 if activate.up.slot != gates.out.slot && can_gate(facts, gates, activate.width, down) => {
            Epilogue::GateOf(activate.activation, activate.up)
        }
        _ => return None,
    };
    let gates = Matmul { epilogue, ..gates.clone() };
    let down = Matmul { input: Input::Floats, ..down.clone() };
    Some((3, [gates, down].map(|op| Node::new(Kernel::Matmul(op))).into()))
}

/// Cooperative matrices: the matmul of gates computes the activations.
fn gate_in_coop(facts: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let (gates, activate, down) = network(nodes)?;
    if gates.few == 0 || class.from <= gates.few as usize || !activate.in_turn {
        return None;
    }
    let epilogue = Epilogue::Activations(activate.activation, facts.layout(down.linears[0].matrix));
    Some((2, vec![Node::new(Kernel::Matmul(Matmul { epilogue, ..gates.clone() }))]))
}

/// Cooperative matrices: a matmul without gates computes the activations of its results.
fn activation_in_coop(facts: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [
        Node { kernel: Kernel::Matmul(up), .. },
        Node { kernel: Kernel::Activate(activate), .. },
        Node { kernel: Kernel::Matmul(down), .. },
        ..,
    ] = nodes
    else {
        return None;
    };
    let is_own = activate.gate.is_none() && activate.up == up.out && up.linears.len() == 1;
    let is_plain = matches!(activate.places, Places::Rows) && up.input == Input::Ready && !up.in_order;
    let can_activate = is_own && is_plain && can_gate(facts, up, activate.width, down);
    let uses_matrices = [up, down].iter().all(|op| kernels::is_cooperative(facts, class, op));
    (can_activate && uses_matrices).then(|| {
        let epilogue = Epilogue::Activations(activate.activation, facts.layout(down.linears[0].matrix));
        (2, vec![Node::new(Kernel::Matmul(Matmul { epilogue, ..up.clone() }))])
    })
}

/// One row: the matmul of gates of experts computes the activations, in floats, which the next matmul quantizes. With 8 rows,
/// quantizing in every workgroup takes longer than a launch.
fn gate_in_experts(_: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [
        Node { kernel: Kernel::ExpertMatmul(gates), .. },
        Node { kernel: Kernel::Activate(activate), .. },
        Node { kernel: Kernel::ExpertMatmul(down), .. },
        ..,
    ] = nodes
    else {
        return None;
    };
    let Order::StackedInTurn(_) = gates.order else { return None };
    if !class.is_one() || gates.tiles.is_some() || !activate.in_turn {
        return None;
    }
    let epilogue = Epilogue::Gate(activate.activation);
    let gates = ExpertMatmul { epilogue, ..gates.clone() };
    let down = ExpertMatmul { input: Input::Floats, ..down.clone() };
    Some((3, [gates, down].map(|op| Node::new(Kernel::ExpertMatmul(op))).into()))
}

/// One row: gate and up of experts also choose them. With more rows, choosing in every workgroup takes longer than a launch.
fn choice_in_experts(_: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [Node { kernel: Kernel::Route(route), .. }, Node { kernel: Kernel::ExpertMatmul(gates), .. }, ..] =
        nodes
    else {
        return None;
    };
    let can_choose = class.is_one() && matches!(gates.epilogue, Epilogue::Gate(_));
    let gates = || ExpertMatmul { chooses: Some(route.clone()), ..gates.clone() };
    can_choose.then(|| (2, vec![Node::new(Kernel::ExpertMatmul(gates()))]))
}

/// One row: the last matmul of experts adds their results to the stream.
fn sum_in_experts(facts: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [Node { kernel: Kernel::ExpertMatmul(down), .. }, Node { kernel: Kernel::AddExperts(sum), .. }, ..] =
        nodes
    else {
        return None;
    };
    let blocks = facts.cols(&down.linears[0]).div_ceil(BLOCK);
    let can_sum = class.is_one()
        && (sum.adds, sum.results, sum.is_weighted) == (Some(1.0), down.out.slot, true)
        && facts.program.hidden.is_multiple_of(BLOCK)
        && facts.is_whole(&vec![down.linears[0]; down.pool.map_or(down.count, |pool| pool.slots)])
        && kernels::has_room_for_sums(&facts.target, down.used, blocks);
    let down = || ExpertMatmul { sums: Some(*sum), epilogue: Epilogue::Add(1.0), ..down.clone() };
    can_sum.then(|| (2, vec![Node::new(Kernel::ExpertMatmul(down()))]))
}

/// Gate and up of experts whose activation another rule fuses: their rows alternate, in all steps.
fn order_experts(facts: &Facts<'_>, _: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [
        Node { kernel: Kernel::ExpertMatmul(gates), .. },
        Node { kernel: Kernel::Activate(activate), .. },
        Node { kernel: Kernel::ExpertMatmul(down), .. },
        ..,
    ] = nodes
    else {
        return None;
    };
    let blocks = activate.width / BLOCK;
    let can_gate = activate.width.is_multiple_of(BLOCK)
        && kernels::has_room(&facts.target, facts.layout(down.linears[0].matrix), blocks);
    // Experts of their own width read the activations that the rule's floats would replace.
    if gates.linears.len() != 2 || gates.acts == Acts::Plain || activate.in_turn || !can_gate {
        return None;
    }
    let gates = ExpertMatmul { order: Order::StackedInTurn(gates.count), ..gates.clone() };
    let mut activate = *activate;
    (activate.in_turn, activate.up.first) = (true, gates.out.first + 1);
    Some((2, vec![Node::new(Kernel::ExpertMatmul(gates)), Node::new(Kernel::Activate(activate))]))
}

/// One row: a matmul that adds to the stream writes the activations of the next norm, whose factor their readers compute.
fn norm_in_matmul(facts: &Facts<'_>, class: RowClass, nodes: &[Node]) -> Option<(usize, Vec<Node>)> {
    let [add, Node { kernel: Kernel::Norm(norm), .. }, rest @ ..] = nodes else { return None };
    let norm = norm.norm.filter(|_| is_fresh(norm))?;
    let is_normed = |node: &Node| node.writes_acts() == Some(Acts::Normed);
    let end = rest.iter().position(is_normed).map_or(rest.len(), |end| end + 1);
    let reads = |node: &&Node| node.reads_acts().is_some_and(|(acts, _)| acts == Acts::Normed);
    let can_apply = |node: &Node| match &node.kernel {
        Kernel::Matmul(op) => op.input == Input::Ready && facts.is_whole(&op.linears),
        Kernel::ExpertMatmul(op) => op.input == Input::Ready && op.tiles.is_none(),
        _ => false,
    };
    if !can_emit(facts, class, add, &norm) || !rest[..end].iter().filter(reads).all(can_apply) {
        return None;
    }
    let mut fused = vec![emits(add, norm)];
    fused.extend(
        rest[..end].iter().map(|node| if reads(&node) { applies(node, norm.eps) } else { node.clone() }),
    );
    Some((2 + end, fused))
}

/// Returns true if a matmul can write the activations of a norm.
fn can_emit(facts: &Facts<'_>, class: RowClass, add: &Node, norm: &paguro_backend::Norm) -> bool {
    let adds = match &add.kernel {
        Kernel::Matmul(op) => matches!(op.epilogue, Epilogue::Add(1.0)) && facts.is_whole(&op.linears),
        Kernel::ExpertMatmul(op) => op.sums.is_some(),
        _ => false,
    };
    adds && class.is_one() && is_plain(norm) && facts.program.hidden.is_multiple_of(BLOCK)
}

fn emits(add: &Node, norm: paguro_backend::Norm) -> Node {
    let mut node = add.clone();
    if let Kernel::Matmul(Matmul { epilogue, .. }) | Kernel::ExpertMatmul(ExpertMatmul { epilogue, .. }) =
        &mut node.kernel
    {
        *epilogue = Epilogue::AddNorm(norm);
    }
    node
}

/// Returns a reader of a norm's activations that applies the norm's factor.
fn applies(node: &Node, eps: f32) -> Node {
    let mut node = node.clone();
    match &mut node.kernel {
        Kernel::Matmul(op) => op.input = Input::Squares(eps),
        Kernel::ExpertMatmul(op) => op.input = Input::Squares(eps),
        _ => {}
    }
    node
}

/// The end of the body: a pending branch is added as by the norm of another layer, so that the rows of a part of a program have the
/// bits of the whole one. In steps of one row, the last matmul writes the activations of the head.
fn end(facts: &Facts<'_>, list: &mut List) {
    let Some(last) = list.body.last_mut() else { return };
    if let Some(adds) = pending(last) {
        let rows = Span { slot: Slot::Stream, stride: facts.program.hidden, first: 0 };
        let norm = NormRows { adds: Some(adds), ..NormRows::new(None, rows, Acts::Normed) };
        *last = Node::new(Kernel::Norm(norm));
    }
    let [Node { kernel: Kernel::Norm(norm), .. }, logits] = &list.head[..] else { return };
    let (Some(norm), Some(head)) = (norm.norm, matmul(logits)) else { return };
    let is_adapted = facts.site(&head.linears, head.order).is_some();
    if can_emit(facts, list.class, last, &norm) && facts.is_whole(&head.linears) && !is_adapted {
        list.direct = Some(applies(logits, norm.eps));
        *last = emits(last, norm);
    }
}

#[cfg(test)]
mod tests;
