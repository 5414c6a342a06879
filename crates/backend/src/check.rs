//! Validation of weights against a program: [`Program::check`], which every backend calls first in `load`.

mod ends;

use std::collections::HashSet;

use crate::{
    AXES, Activation, Attention, Beside, Bounds, Convolution, DeltaRule, Dense, DistanceBias, Embed, Exit,
    ExpertGroups, Experts, FeedForward, Head, Input, Joined, KvGroup, KvSlot, Latent, LatentQuery,
    LatentShape, LayerEmbeds, LayerInput, Linear, LoadError, Matrix, MatrixId, Mixer, Norm, NormKind,
    Program, Projection, QkNormKind, Residual, Role, SharedExpert, ShortConv, Ssd, StateShape, TableId,
    VectorId, Visitor, Weights,
};

impl Program {
    /// Checks that every id exists, and that every matrix and vector has the shape that its operation needs and the
    /// bytes of its shape. A backend may index without checks afterwards.
    ///
    /// # Errors
    /// [`LoadError::BadProgram`], or [`LoadError::BadWeights`] with the tensor and its problem.
    pub fn check(&self, weights: &Weights) -> Result<(), LoadError> {
        let Self {
            hidden,
            vocab,
            bidirectional,
            shares_pages,
            kv,
            state: _,
            ropes,
            input,
            given_parts,
            layers,
            exit,
        } = self;
        let (hidden, vocab) = (*hidden, *vocab);
        nonzero("a width of the program", &[hidden, self.kv.groups.len()])?;
        // A tower may consist of its ends.
        let has_ends = matches!(exit, Exit::Merged(_));
        require(has_ends || !layers.is_empty(), || "there are no layers".to_owned())?;
        let has_vocab = matches!(input, Input::Tokens(_)) || matches!(exit, Exit::Logits(_));
        require(!has_vocab || vocab > 0, || "there are no tokens".to_owned())?;
        require(*given_parts <= layers.len() + 1, || {
            format!("{given_parts} parts of given rows for {} layers", layers.len())
        })?;
        let is_given = matches!(input, Input::Rows);
        require(!is_given || *given_parts > 0, || "neither tokens nor given rows".to_owned())?;
        let is_tower = matches!(input, Input::Patches(_));
        require(!is_tower || *given_parts == 1, || format!("{given_parts} parts of given patches"))?;
        for (index, rope) in ropes.iter().enumerate() {
            let pairs = rope.frequencies.len();
            let fits = rope.axes.is_empty() || rope.axes.len() == pairs;
            require(fits && rope.axes.iter().all(|axis| usize::from(*axis) < AXES), || {
                format!("rope {index} has the axes {:?} for {pairs} pairs", rope.axes)
            })?;
        }
        self.check_references(weights)?;
        for group in &self.kv.groups {
            nonzero("a dimension of K and V", &[group.layer_slots, group.kv_heads, group.head_dim])?;
            require(group.window != Some(0), || "a sliding window of no tokens".to_owned())?;
        }
        check_sizes(weights)?;

        let weights = Checker { weights, hidden, is_tower };
        match input {
            Input::Tokens(embed) => self.check_embed(embed, &weights)?,
            Input::Rows => {}
            Input::Patches(patches) => weights.patches(patches)?,
        }
        let mut stored = HashSet::new();
        if *shares_pages {
            // All slots are those of the other program.
            for (group, KvGroup { layer_slots, .. }) in kv.groups.iter().enumerate() {
                stored.extend((0..*layer_slots).map(|layer_slot| KvSlot { group, layer_slot }));
            }
            self.check_shared_pages()?;
        }
        for layer in layers {
            finite("the scale of a layer's branches", layer.branch_scale)?;
            finite("the scale of a layer's output", layer.output_scale)?;
            self.check_mixer(&layer.mixer, &mut stored, &weights)?;
            weights.optional_norm(layer.norm_after_mixer, hidden)?;
            weights.optional_norm(layer.norm_after_ffn, hidden)?;
            let has_none = matches!((&layer.mixer, &layer.ffn), (Mixer::None, _) | (_, FeedForward::None));
            let norms_after = layer.norm_after_mixer.is_some() || layer.norm_after_ffn.is_some();
            require(!(has_none && norms_after), || {
                "norms after the branches of a layer that lacks one".to_owned()
            })?;
            let is_parallel = layer.residual == Residual::Parallel;
            require(layer.norm_after_mixer.is_none() || !is_parallel, || {
                "a norm after the mixer of a layer with parallel branches".to_owned()
            })?;
            match &layer.ffn {
                FeedForward::None => {}
                FeedForward::Dense(dense) => weights.dense(dense)?,
                FeedForward::Experts(experts) => weights.experts(experts)?,
            }
            if let Some(input) = &layer.input {
                self.check_layer_input(input, &weights)?;
            }
        }
        self.check_states()?;
        let is_attention = |mixer: &Mixer| matches!(mixer, Mixer::Attention(_));
        require(!bidirectional || self.mixers().all(is_attention), || {
            "mixers other than attention in a bidirectional program".to_owned()
        })?;
        match exit {
            Exit::Logits(Head { norm, linear, scale, soft_cap: _, projection }) => {
                weights.norm(norm, hidden)?;
                finite("the scale of logits", *scale)?;
                weights.linear(linear, vocab, hidden)?;
                projection.iter().try_for_each(|Projection { width, linear }| {
                    nonzero("the width of a projection", &[*width])?;
                    weights.linear(linear, *width, hidden)
                })
            }
            Exit::Rows => Ok(()),
            Exit::Merged(merged) => weights.merged(merged, layers.len()),
        }
    }

    /// Checks a program that reads the pages of another one.
    fn check_shared_pages(&self) -> Result<(), LoadError> {
        let stores = |mixer: &Mixer| !matches!(mixer, Mixer::Attention(Attention { k: None, .. }));
        require(!self.mixers().any(stores) && !self.bidirectional, || {
            "K, V or states of a program that reads the pages of another one".to_owned()
        })?;
        // A row does not see itself, so that a window of one token is empty.
        let sees = |group: &KvGroup| group.window.is_none_or(|window| window > 1) && !group.spans;
        require(self.kv.groups.iter().all(sees), || {
            "a window or spans without tokens in a program that reads the pages of another one".to_owned()
        })
    }

    /// Checks that every id exists.
    fn check_references(&self, weights: &Weights) -> Result<(), LoadError> {
        struct Missing<'a> {
            weights: &'a Weights,
            found: Option<String>,
        }
        impl Missing<'_> {
            fn check(&mut self, what: &str, id: u32, count: usize) {
                if id as usize >= count {
                    self.found.get_or_insert(format!("there is no {what} {id}"));
                }
            }
        }
        impl Visitor for Missing<'_> {
            fn matrix(&mut self, id: &mut MatrixId, _: Role) {
                self.check("matrix", id.0, self.weights.matrices.len());
            }

            fn vector(&mut self, id: &mut VectorId) {
                self.check("vector", id.0, self.weights.vectors.len());
            }

            fn table(&mut self, id: &mut TableId) {
                self.check("table", id.0, self.weights.tables.len());
            }
        }
        let mut missing = Missing { weights, found: None };
        self.clone().visit(&mut missing);
        missing.found.map_or(Ok(()), |problem| Err(LoadError::BadProgram(problem)))
    }

    fn check_embed(&self, embed: &Embed, weights: &Checker<'_>) -> Result<(), LoadError> {
        let Embed { table, scale, positions, types, norm, layers, joined } = embed;
        let width = self.part_width();
        weights.matrix(*table, 1, self.vocab, width)?;
        finite("the scale of embeddings", *scale)?;
        if let Some(positions) = positions {
            weights.matrix(positions.table, 1, positions.count, width)?;
        }
        if let Some(types) = types {
            nonzero("the number of token types", &[types.count])?;
            let size = types.count.checked_mul(width);
            let size = size.filter(|_| u32::try_from(self.token_ids()).is_ok());
            let size = size.ok_or_else(|| LoadError::BadProgram(format!("{} token types", types.count)))?;
            weights.vector(types.table, size)?;
        }
        weights.optional_norm(*norm, width)?;
        if let Some(layers) = layers {
            require(types.is_none(), || "token types beside embeddings for layers".to_owned())?;
            self.check_layer_embeds(layers, weights)?;
        }
        if let Some(Joined { width, token_norm, given_norm, linear }) = joined {
            let (parts, fits) = (self.given_parts, layers.is_none() && !self.bidirectional);
            require(parts == 1 && fits, || format!("{parts} parts of given rows beside embeddings"))?;
            nonzero("the width of embeddings", &[*width])?;
            weights.optional_norm(*token_norm, *width)?;
            weights.optional_norm(*given_norm, *width)?;
            weights.linear(linear, self.hidden, 2 * width)?;
        }
        Ok(())
    }

    /// `stored`: where earlier layers store K and V.
    fn check_mixer(
        &self,
        mixer: &Mixer,
        stored: &mut HashSet<KvSlot>,
        weights: &Checker<'_>,
    ) -> Result<(), LoadError> {
        match mixer {
            Mixer::None => {}
            Mixer::Attention(attention) => {
                self.check_attention(attention, weights)?;
                let place = attention.kv;
                match attention.k {
                    Some(_) => drop(stored.insert(place)),
                    None => require(stored.contains(&place), || {
                        format!("no earlier layer stores K and V at {place:?}")
                    })?,
                }
            }
            Mixer::Latent(latent) => {
                self.check_latent(latent, weights)?;
                stored.insert(latent.kv);
            }
            Mixer::Conv(conv) => self.check_conv(conv, weights)?,
            Mixer::DeltaRule(delta) => self.check_delta(delta, weights)?,
            Mixer::Ssd(ssd) => self.check_ssd(ssd, weights)?,
            Mixer::Sum(branches) => {
                require(branches.len() > 1, || format!("a sum of {} mixers", branches.len()))?;
                for branch in branches {
                    let is_one = !matches!(branch.mixer, Mixer::None | Mixer::Sum(_));
                    require(is_one, || "a sum of no mixers".to_owned())?;
                    finite("the scale of a mixer", branch.scale)?;
                    self.check_mixer(&branch.mixer, stored, weights)?;
                }
            }
        }
        Ok(())
    }

    fn check_attention(&self, attention: &Attention, weights: &Checker<'_>) -> Result<(), LoadError> {
        let KvSlot { group, layer_slot } = attention.kv;
        let exists = self.kv.groups.get(group).is_some_and(|group| layer_slot < group.layer_slots);
        require(exists, || format!("there is no place {:?} for K and V", attention.kv))?;
        let (heads, hidden) = (attention.heads, self.hidden);
        let group = self.kv_group(attention);
        let (kv_heads, head_dim, kv_width) = (group.kv_heads, group.head_dim, group.width());
        require(heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads cannot share {kv_heads} K/V heads evenly")
        })?;
        let width = heads * head_dim;
        weights.optional_norm(attention.norm, hidden)?;
        weights.bounded(&attention.q, width, hidden)?;
        let is_own = attention.k.is_some();
        require(is_own || attention.v.is_none() && attention.v_norm.is_none(), || {
            "V of its own in a layer that reads another one's K".to_owned()
        })?;
        let has_row_norm = attention.qk_norm.is_some_and(|norm| norm.kind == QkNormKind::Row);
        require(attention.v.is_some() || !is_own || !has_row_norm, || {
            "V from K with norms of whole rows".to_owned()
        })?;
        for linear in attention.k.iter().chain(&attention.v) {
            weights.bounded(linear, kv_width, hidden)?;
        }
        weights.optional_norm(attention.v_norm, head_dim)?;
        if let Some(norm) = &attention.qk_norm {
            let (q, k) = match norm.kind {
                QkNormKind::Head | QkNormKind::HeadAfterRope => (head_dim, head_dim),
                QkNormKind::Row => (width, kv_width),
            };
            weights.norm(&norm.q, q)?;
            if is_own {
                weights.norm(&norm.k, k)?;
            }
        }
        if let Some(index) = attention.rope {
            let rope = self.ropes.get(index);
            let rope = rope.ok_or_else(|| LoadError::BadProgram(format!("there is no rope {index}")))?;
            let rotated = 2 * rope.frequencies.len();
            require(rotated <= head_dim, || {
                format!("rope {index} rotates {rotated} of {head_dim} elements")
            })?;
        }
        if let Some(scale) = &attention.position_scale {
            require(scale.original > 0, || "a scale by position with a context of 0".to_owned())?;
            finite("a scale by position", scale.beta)?;
        }
        if let Some(DistanceBias { table, reach }) = attention.distance_bias {
            let size = reach.checked_mul(2).and_then(|twice| twice.checked_add(1)?.checked_mul(heads));
            let size =
                size.ok_or_else(|| LoadError::BadProgram(format!("biases of distances up to {reach}")))?;
            weights.vector(table, size)?;
        }
        attention.sinks.iter().try_for_each(|&sinks| weights.vector(sinks, heads))?;
        attention.gate.iter().try_for_each(|gate| weights.linear(gate, width, hidden))?;
        weights.bounded(&attention.out, hidden, width)?;
        weights.optional_norm(attention.post_norm, hidden)
    }

    fn check_latent(&self, op: &Latent, weights: &Checker<'_>) -> Result<(), LoadError> {
        let LatentShape { heads, plain, rotated, latent, value } = op.shape;
        let hidden = self.hidden;
        nonzero("a dimension of latent attention", &[heads, plain, rotated, latent, value])?;
        let group = self.kv.groups.get(op.kv.group).filter(|group| op.kv.layer_slot < group.layer_slots);
        let fits = group.is_some_and(|group| group.kv_heads == 1 && group.head_dim == op.shape.key_dim());
        require(fits, || format!("there is no place {:?} for a latent vector", op.kv))?;
        weights.optional_norm(op.norm, hidden)?;
        match &op.query {
            LatentQuery::Direct(linear) => weights.linear(linear, op.shape.query_width(), hidden)?,
            LatentQuery::Down { down, rank, norm, up } => {
                nonzero("the rank of queries", &[*rank])?;
                weights.linear(down, *rank, hidden)?;
                weights.norm(norm, *rank)?;
                weights.linear(up, op.shape.query_width(), *rank)?;
            }
        }
        weights.linear(&op.down, op.shape.key_dim(), hidden)?;
        weights.norm(&op.latent_norm, latent)?;
        require(op.absorb.bias.is_none() && op.value.bias.is_none(), || {
            "a bias of a head of latent attention".to_owned()
        })?;
        weights.stack(&op.absorb, heads, latent, plain)?;
        weights.stack(&op.value, heads, value, latent)?;
        let pairs = self.ropes.get(op.rope).map(|rope| 2 * rope.frequencies.len());
        require(pairs.is_some_and(|pairs| pairs <= rotated), || {
            format!("rope {} does not fit {rotated} elements", op.rope)
        })?;
        if let Some(scale) = &op.position_scale {
            require(scale.original > 0, || "a scale by position with a context of 0".to_owned())?;
            finite("a scale by position", scale.beta)?;
        }
        weights.linear(&op.out, hidden, op.shape.value_width())?;
        weights.optional_norm(op.post_norm, hidden)
    }

    fn check_layer_embeds(&self, op: &LayerEmbeds, weights: &Checker<'_>) -> Result<(), LoadError> {
        let LayerEmbeds { table, scale, count, width, projection, norm } = op;
        nonzero("a dimension of embeddings for layers", &[*count, *width])?;
        finite("the scale of embeddings for layers", *scale)?;
        let all = count.checked_mul(*width);
        let all =
            all.ok_or_else(|| LoadError::BadProgram("embeddings for layers are too wide".to_owned()))?;
        shape_of(weights.weights.table(*table), 1, self.vocab, all)?;
        weights.linear(projection, all, self.hidden)?;
        weights.norm(norm, *width)
    }

    fn check_layer_input(&self, op: &LayerInput, weights: &Checker<'_>) -> Result<(), LoadError> {
        let embeds = self.layer_embeds().filter(|embeds| op.index < embeds.count);
        let embeds = embeds
            .ok_or_else(|| LoadError::BadProgram(format!("there is no embedding {} for layers", op.index)))?;
        require(!matches!(op.activation, Activation::ClampedSwiglu { alpha: _, limit: _ }), || {
            "clamped SwiGLU of an embedding for layers".to_owned()
        })?;
        weights.linear(&op.gate, embeds.width, self.hidden)?;
        weights.linear(&op.out, self.hidden, embeds.width)?;
        weights.optional_norm(op.post_norm, self.hidden)
    }

    fn check_conv(&self, conv: &ShortConv, weights: &Checker<'_>) -> Result<(), LoadError> {
        let ShortConv { norm, width, input, convolution, out, post_norm, state } = conv;
        nonzero("the width of a short convolution", &[*width])?;
        weights.optional_norm(*norm, self.hidden)?;
        weights.linear(input, 3 * width, self.hidden)?;
        let rows = weights.convolution(convolution, *width)?;
        weights.linear(out, self.hidden, *width)?;
        weights.optional_norm(*post_norm, self.hidden)?;
        self.check_state(*state, StateShape { rows, channels: *width, delta: None })
    }

    fn check_delta(&self, op: &DeltaRule, weights: &Checker<'_>) -> Result<(), LoadError> {
        let DeltaRule {
            norm,
            shape,
            sharing: _,
            qkv,
            gate,
            alpha,
            beta,
            convolution,
            decay,
            dt,
            out_norm,
            out,
            post_norm,
            state,
        } = op;
        let (heads, hidden) = (shape.value_heads, self.hidden);
        let dimensions = [shape.key_heads, heads, shape.key_dim, shape.value_dim];
        nonzero("a dimension of a delta rule", &dimensions)?;
        require(heads.is_multiple_of(shape.key_heads), || {
            format!("{heads} value heads cannot share {} key heads evenly", shape.key_heads)
        })?;
        weights.optional_norm(*norm, hidden)?;
        weights.linear(qkv, shape.channels(), hidden)?;
        weights.linear(gate, shape.value_width(), hidden)?;
        weights.linear(alpha, heads, hidden)?;
        weights.linear(beta, heads, hidden)?;
        let rows = weights.convolution(convolution, shape.channels())?;
        weights.vector(*decay, heads)?;
        let decays = weights.weights.vector(*decay);
        require(decays.iter().all(|decay| decay.is_finite() && *decay <= 0.0), || {
            "a decay of a delta rule that grows".to_owned()
        })?;
        weights.vector(*dt, heads)?;
        weights.norm(out_norm, shape.value_dim)?;
        let is_rms = out_norm.kind == NormKind::Rms && out_norm.bias.is_none();
        require(is_rms, || "the output norm of a delta rule is not RMS".to_owned())?;
        weights.linear(out, hidden, shape.value_width())?;
        weights.optional_norm(*post_norm, hidden)?;
        self.check_state(*state, StateShape { rows, channels: shape.channels(), delta: Some(*shape) })
    }

    fn check_ssd(&self, op: &Ssd, weights: &Checker<'_>) -> Result<(), LoadError> {
        let Ssd {
            norm,
            shape,
            cbv,
            gate,
            gate_scale,
            dt,
            dt_scale,
            dt_bias,
            dt_limits,
            convolution,
            decay,
            skip,
            out_norm,
            out,
            post_norm,
            state,
        } = op;
        let (heads, hidden, width) = (shape.value_heads, self.hidden, shape.value_width());
        nonzero("a dimension of a scan", &[shape.key_heads, heads, shape.key_dim, shape.value_dim])?;
        require(heads.is_multiple_of(shape.key_heads), || {
            format!("{heads} heads of a scan cannot share {} groups evenly", shape.key_heads)
        })?;
        weights.optional_norm(*norm, hidden)?;
        weights.linear(cbv, shape.channels(), hidden)?;
        weights.linear(gate, width, hidden)?;
        weights.linear(dt, heads, hidden)?;
        finite("the scale of a scan's gate", *gate_scale)?;
        finite("the scale of a scan's steps", *dt_scale)?;
        weights.vector(*dt_bias, heads)?;
        require(0.0 <= dt_limits.0 && dt_limits.0 <= dt_limits.1, || {
            format!("steps of a scan between {} and {}", dt_limits.0, dt_limits.1)
        })?;
        let rows = weights.convolution(convolution, shape.channels())?;
        weights.vector(*decay, heads)?;
        let decays = weights.weights.vector(*decay);
        require(decays.iter().all(|decay| decay.is_finite() && *decay <= 0.0), || {
            "a decay of a scan that grows".to_owned()
        })?;
        weights.vector(*skip, heads)?;
        if let Some(norm) = out_norm.norm() {
            require(norm.groups > 0 && width.is_multiple_of(norm.groups), || {
                format!("norms of {} groups of {width} elements", norm.groups)
            })?;
            weights.vector(norm.weight, width)?;
        }
        weights.linear(out, hidden, width)?;
        weights.optional_norm(*post_norm, hidden)?;
        self.check_state(*state, StateShape { rows, channels: shape.channels(), delta: Some(*shape) })
    }

    fn check_state(&self, index: usize, needed: StateShape) -> Result<(), LoadError> {
        let found = self.state.layers.get(index);
        let fits = found.is_some_and(|found| {
            found.rows >= needed.rows && StateShape { rows: needed.rows, ..*found } == needed
        });
        require(fits, || format!("state {index} is {found:?}, a layer needs {needed:?}"))
    }

    /// Checks that every state belongs to one layer.
    fn check_states(&self) -> Result<(), LoadError> {
        let mut used: Vec<usize> = self.mixers().filter_map(Mixer::state).collect();
        used.sort_unstable();
        let all = used.iter().copied().eq(0..self.state.layers.len());
        require(all, || format!("layers use the states {used:?} of {}", self.state.layers.len()))
    }
}

/// Checks that every matrix has the bytes of its shape.
fn check_sizes(weights: &Weights) -> Result<(), LoadError> {
    for matrix in weights.matrices.iter().chain(&weights.tables) {
        let (block, bytes) = (matrix.format.block_len(), matrix.bytes.len());
        require_of(&matrix.name, matrix.cols.is_multiple_of(block), || {
            format!("rows of {} elements are not whole {} blocks of {block}", matrix.cols, matrix.format)
        })?;
        let blocks = matrix.parts.checked_mul(matrix.rows);
        let blocks = blocks.and_then(|rows| rows.checked_mul(matrix.cols / block));
        let expected = blocks.and_then(|blocks| blocks.checked_mul(matrix.format.block_bytes()));
        require_of(&matrix.name, expected == Some(bytes), || {
            let shape = shape(matrix.parts, matrix.rows, matrix.cols);
            format!("{bytes} bytes for {shape} elements of {}", matrix.format)
        })?;
    }
    Ok(())
}

struct Checker<'a> {
    weights: &'a Weights,
    hidden: usize,
    /// True if the program is a tower.
    is_tower: bool,
}

impl Checker<'_> {
    fn dense(&self, dense: &Dense) -> Result<(), LoadError> {
        let Dense { norm, width, gate, up, activation, down, post_norm } = dense;
        nonzero("the width of a feed-forward network", &[*width])?;
        let clamped = matches!(activation, Activation::ClampedSwiglu { alpha: _, limit: _ });
        require(gate.is_some() || !clamped, || "clamped SwiGLU without a gate".to_owned())?;
        self.optional_norm(*norm, self.hidden)?;
        gate.iter().try_for_each(|gate| self.bounded(gate, *width, self.hidden))?;
        self.bounded(up, *width, self.hidden)?;
        self.bounded(down, self.hidden, *width)?;
        self.optional_norm(*post_norm, self.hidden)
    }

    fn experts(&self, experts: &Experts) -> Result<(), LoadError> {
        let Experts {
            norm,
            router,
            count,
            width,
            latent,
            gate,
            up,
            activation,
            down,
            shared,
            beside,
            post_norm,
        } = experts;
        let (count, width, hidden) = (*count, *width, self.hidden);
        let clamped = matches!(activation, Activation::ClampedSwiglu { alpha: _, limit: _ });
        require(gate.is_some() || !clamped, || "clamped SwiGLU without a gate".to_owned())?;
        nonzero("a dimension of a mixture of experts", &[count, width, router.used])?;
        require(router.used <= count, || format!("{} of {count} experts for each row", router.used))?;
        finite("the factor of a router's weights", router.factor)?;
        if let Some(groups) = router.groups {
            let ExpertGroups { count: groups, used, best } = groups;
            let divides = groups > 0 && count.is_multiple_of(groups);
            let fits = divides && (1..=groups).contains(&used) && (1..=count / groups).contains(&best);
            let enough = fits && router.used <= count / groups * used;
            require(enough, || format!("{} of {count} experts in {used} of {groups} groups", router.used))?;
        }
        self.optional_norm(*norm, hidden)?;
        self.optional_norm(router.norm, hidden)?;
        router.expert_scale.iter().try_for_each(|&scale| self.vector(scale, count))?;
        self.linear(&router.linear, count, hidden)?;
        let matrix = self.weights.matrix(router.linear.matrix);
        require_of(&matrix.name, !matrix.format.is_quantized(), || {
            format!("a router in {}; F32, F16 and BF16 work", matrix.format)
        })?;
        router.selection_bias.iter().try_for_each(|&bias| self.vector(bias, count))?;
        let expert_row = latent.map_or(hidden, |latent| latent.width);
        if let Some(latent) = latent {
            nonzero("the width of rows of experts", &[latent.width])?;
            require(beside.is_none(), || "rows of their own of experts beside a network".to_owned())?;
            self.linear(&latent.down, latent.width, hidden)?;
            self.linear(&latent.up, hidden, latent.width)?;
        }
        gate.iter().try_for_each(|gate| self.stack(gate, count, width, expert_row))?;
        self.stack(up, count, width, expert_row)?;
        self.stack(down, count, expert_row, width)?;
        if let Some(SharedExpert { width, gate: own_gate, up, down, output_gate }) = shared {
            nonzero("the width of a shared expert", &[*width])?;
            require(own_gate.is_some() == gate.is_some(), || {
                "gates of a shared expert or of the others only".to_owned()
            })?;
            own_gate.iter().try_for_each(|gate| self.linear(gate, *width, hidden))?;
            self.linear(up, *width, hidden)?;
            self.linear(down, hidden, *width)?;
            output_gate.iter().try_for_each(|gate| self.linear(gate, 1, hidden))?;
        }
        if let Some(Beside { dense, sum_norm }) = beside.as_deref() {
            require(shared.is_none(), || "a shared expert and a network beside experts".to_owned())?;
            self.dense(dense)?;
            self.norm(sum_norm, hidden)?;
        }
        self.optional_norm(*post_norm, hidden)
    }

    /// Returns the number of earlier rows that a convolution needs.
    fn convolution(&self, convolution: &Convolution, channels: usize) -> Result<usize, LoadError> {
        let Convolution { taps, weight, bias } = *convolution;
        require((2..=64).contains(&taps), || format!("a convolution over {taps} rows"))?;
        self.vector(weight, taps * channels)?;
        bias.iter().try_for_each(|&bias| self.vector(bias, channels))?;
        Ok(taps - 1)
    }

    fn matrix(&self, id: MatrixId, parts: usize, rows: usize, cols: usize) -> Result<(), LoadError> {
        shape_of(self.weights.matrix(id), parts, rows, cols)
    }

    fn vector(&self, id: VectorId, width: usize) -> Result<(), LoadError> {
        let vector = self.weights.vector(id);
        require_of(&format!("vector {}", id.0), vector.len() == width, || {
            format!("it has {} elements, the model needs {width}", vector.len())
        })
    }

    fn norm(&self, norm: &Norm, width: usize) -> Result<(), LoadError> {
        self.vector(norm.weight, width)?;
        norm.bias.iter().try_for_each(|&bias| self.vector(bias, width))
    }

    fn optional_norm(&self, norm: Option<Norm>, width: usize) -> Result<(), LoadError> {
        norm.iter().try_for_each(|norm| self.norm(norm, width))
    }

    /// Checks the shape of a matrix of a tower's layers, which may have bounds.
    fn bounded(&self, linear: &Linear, rows: usize, cols: usize) -> Result<(), LoadError> {
        let Some(bounds) = &linear.bounds else { return self.linear(linear, rows, cols) };
        let Bounds { input_min, input_max, output_min, output_max } = *bounds;
        require(self.is_tower && linear.bias.is_none(), || {
            "bounds of a matrix outside of a tower's layers, or with a bias".to_owned()
        })?;
        // Not true if one of them is not a number.
        require(input_min <= input_max && output_min <= output_max, || format!("the bounds {bounds:?}"))?;
        self.matrix(linear.matrix, 1, rows, cols)
    }

    fn linear(&self, linear: &Linear, rows: usize, cols: usize) -> Result<(), LoadError> {
        self.stack(linear, 1, rows, cols)
    }

    fn stack(&self, linear: &Linear, parts: usize, rows: usize, cols: usize) -> Result<(), LoadError> {
        require(linear.bounds.is_none(), || {
            "bounds of a matrix that is none of a tower's layers".to_owned()
        })?;
        self.matrix(linear.matrix, parts, rows, cols)?;
        linear.bias.iter().try_for_each(|&bias| self.vector(bias, parts * rows))
    }
}

/// Checks a matrix's shape.
fn shape_of(matrix: &Matrix, parts: usize, rows: usize, cols: usize) -> Result<(), LoadError> {
    let found = (matrix.parts, matrix.rows, matrix.cols);
    require_of(&matrix.name, found == (parts, rows, cols), || {
        let found = shape(matrix.parts, matrix.rows, matrix.cols);
        format!("it is {found}, the model needs {}", shape(parts, rows, cols))
    })
}

/// `3 x 4`, or `2 x 3 x 4` for a stack.
fn shape(parts: usize, rows: usize, cols: usize) -> String {
    if parts == 1 { format!("{rows} x {cols}") } else { format!("{parts} x {rows} x {cols}") }
}

fn nonzero(what: &str, sizes: &[usize]) -> Result<(), LoadError> {
    require(!sizes.contains(&0), || format!("{what} is zero"))
}

fn finite(what: &str, number: f32) -> Result<(), LoadError> {
    require(number.is_finite(), || format!("{what} is {number}"))
}

/// A rule about the program alone.
fn require(holds: bool, problem: impl FnOnce() -> String) -> Result<(), LoadError> {
    if holds { Ok(()) } else { Err(LoadError::BadProgram(problem())) }
}

/// A rule about one tensor.
fn require_of(tensor: &str, holds: bool, problem: impl FnOnce() -> String) -> Result<(), LoadError> {
    if holds { Ok(()) } else { Err(LoadError::BadWeights { tensor: tensor.to_owned(), problem: problem() }) }
}
