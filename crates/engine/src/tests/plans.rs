//! Decisions of the scheduler, as [scripts](super::script) with results.

use expect_test::expect;

use super::script::check;

#[test]
fn one_sequence_prefills_in_chunks_and_decodes() {
    check(
        "pages 8, rows 4",
        "A 10 +3 \n run",
        expect![[r#"
        run A 0..4; free 7 cached 0
        run A 4..8; free 6 cached 0
        run A 8..10; free 5 cached 0
        run A 10; free 5 cached 0
        run A 11; free 5 cached 3
          A: Length
    "#]],
    );
}

#[test]
fn decodes_come_first_and_prompts_share_the_rest() {
    check(
        "pages 32, rows 6",
        "A 4 +9 \n step \n B 3 +9 \n C 12 +2 \n D 4 +2 \n step 5",
        expect![[r#"
            run A 0..4; free 31 cached 0
            run A 4, B 0..3, C 0..2; hold D; free 28 cached 0
            run A 5, B 3, D 0..4; hold C; free 27 cached 0
            run A 6, B 4, C 2..5, D 4; free 25 cached 1
              D: Length
            run A 7, B 5, C 5..9; free 24 cached 1
            run A 8, B 6, C 9..12; free 23 cached 1
        "#]],
    );
}

#[test]
fn prompts_get_the_rows_that_there_is_time_for() {
    check(
        "pages 32, rows 12, row 25",
        "A 6 +4 \n step \n B 20 +1 \n run",
        expect![[r#"
            run A 0..6; free 30 cached 0
            run A 6, B 0..4; free 29 cached 0
            run A 7, B 4..8; free 28 cached 0
            run A 8, B 8..12; free 27 cached 2
              A: Length
            run B 12..20; free 25 cached 7
              B: Length
        "#]],
    );
    check(
        "pages 32, rows 12, row 25",
        "A 6 +5 \n step 3 \n B 3 +2 \n C 9 +1 \n D 3 +2 \n step 3",
        expect![[r#"
            run A 0..6; free 30 cached 0
            run A 6; free 30 cached 0
            run A 7; free 30 cached 0
            run A 8, B 0..3, C 0; hold D; free 27 cached 0
            run A 9, B 3, C 1, D 0..3; free 27 cached 3
              A: Length
              B: Length
            run C 2..6, D 3; free 26 cached 4
              D: Length
        "#]],
    );
}

/// A new prompt joins the step that is planned ahead, and the row of a cancelled sequence is dropped.
#[test]
fn while_sequences_decode_the_next_step_is_planned_ahead() {
    check(
        "pages 8, rows 8, carries",
        "A 6 +6 \n B 3 +4 \n step 3 \n C 4 +8 \n step 4 \n cancel C \n run",
        expect![[r#"
            run A 0..5, B 0..3; ahead; free 5 cached 0
            run A 5, B 3; ahead; free 4 cached 0
            run A 6, B 4; ahead; free 4 cached 0
            run A 7, B 5; hold C; ahead; free 3 cached 1
              B: Length
            run A 8, C 0..4; ahead; free 2 cached 1
            run A 9, C 4; ahead; free 2 cached 1
            run A 10, C 5; ahead; free 3 cached 3
              A: Length
            cancel C; free 4 cached 4
              C: Cancelled
            run ; free 4 cached 4
        "#]],
    );
}

#[test]
fn a_long_prompt_is_computed_in_steps_that_are_planned_ahead() {
    check(
        "pages 16, rows 5, carries",
        "A 3 +9 \n step 2 \n B 14 +3 \n C 6 +2 x2 \n run",
        expect![[r#"
        run A 0..3; ahead; free 15 cached 0
        run A 3; ahead; free 14 cached 0
        run A 4; hold B C; ahead; free 13 cached 0
        run A 5, C 0..4; hold B; ahead; free 11 cached 0
        run A 6, B 0..3, C 4; free 11 cached 0
        run A 7, B 3..6, C 5; free 10 cached 0
        run A 8, B 6..8, C 6, C.1 6; copy 5>8; ahead; free 9 cached 1
          C: Length
          C.1: Length
        run A 9, B 8..12; ahead; free 8 cached 1
        run A 10, B 12..14; ahead; free 9 cached 3
          A: Length
        run B 14; ahead; free 9 cached 3
        run B 15; free 9 cached 7
          B: Length
    "#]],
    );
}

/// Without room, the queue does not end planning ahead. A free place is used one step later.
#[test]
fn requests_without_a_place_wait_while_steps_are_planned_ahead() {
    check(
        "pages 32, sequences 2, carries",
        "A 4 +4 \n B 4 +7 \n C 4 +3 \n D 4 +2 \n run",
        expect![[r#"
            run A 0..4, B 0..4; hold C D; ahead; free 28 cached 0
            run A 4, B 4; hold C D; ahead; free 28 cached 0
            run A 5, B 5; hold C D; ahead; free 28 cached 0
            run A 6, B 6; hold C D; ahead; free 29 cached 1
              A: Length
            run B 7; hold C D; ahead; free 27 cached 1
            run B 8, C 0..4; hold D; ahead; free 26 cached 1
            run B 9, C 4; hold D; ahead; free 27 cached 3
              B: Length
            run C 5; hold D; free 28 cached 4
              C: Length
            run D 0..4; ahead; free 26 cached 4
            run D 4; free 27 cached 5
              D: Length
        "#]],
    );
}

/// Scores and a preemption need the results of the step before.
#[test]
fn some_work_ends_planning_ahead() {
    check(
        "pages 32, sequences 2, carries",
        "A 4 +9 \n B 4 +9 \n step 2 \n C 6 +2 score 2 prio 1 \n run",
        expect![[r#"
            run A 0..4, B 0..4; ahead; free 28 cached 0
            run A 4, B 4; ahead; free 28 cached 0
            run A 5, B 5; hold C; free 28 cached 0
            run C 0..6, A 6; hold B; free 27 cached 1
              C: 3 scores from 2
            run C 6, A 7; hold B; ahead; free 27 cached 2
              C: Length
            run A 8; hold B; ahead; free 26 cached 1
            run A 9, B 4..7; ahead; free 26 cached 1
            run A 10, B 7; ahead; free 25 cached 1
            run A 11, B 8; ahead; free 25 cached 4
              A: Length
            run B 9; ahead; free 25 cached 4
            run B 10; ahead; free 25 cached 4
            run B 11; free 25 cached 7
              B: Length
        "#]],
    );
}

#[test]
fn the_head_waits_for_pages_and_nobody_overtakes_it() {
    check(
        "pages 6",
        "A 12 +4 \n B 12 +2 \n C 2 +2 \n run",
        expect![[r#"
        run A 0..12; hold B C; free 3 cached 0
        run A 12; hold B C; free 2 cached 0
        run A 13; hold B C; free 2 cached 0
        run A 14; hold B C; free 3 cached 3
          A: Length
        run B 0..12, C 0..2; free 0 cached 2
        run B 12, C 2; free 2 cached 4
          B: Length
          C: Length
    "#]],
    );
}

#[test]
fn sequences_that_fit_exactly_run_together() {
    check(
        "pages 9, no cache",
        "A 8 +4 \n step 2 \n B 8 +5 \n C 8 +5 \n run",
        expect![[r#"
        run A 0..8; free 7 cached 0
        run A 8; free 6 cached 0
        run A 9, B 0..8, C 0..7; free 2 cached 0
        run A 10, B 8, C 7; free 4 cached 0
          A: Length
        run B 9, C 8; free 3 cached 0
        run B 10, C 9; free 3 cached 0
        run B 11, C 10; free 6 cached 0
          B: Length
        run C 11; free 9 cached 0
          C: Length
    "#]],
    );
    check(
        "pages 6, rows 36, no cache",
        "A 12 +0 \n B 12 +0 \n C 12 +0 \n run",
        expect![[r#"
            run A 0..12, B 0..12; hold C; free 6 cached 0
              A: Length
              B: Length
            run C 0..12; free 6 cached 0
              C: Length
        "#]],
    );
}

#[test]
fn higher_priority_goes_first_in_the_queue_and_among_prompts() {
    check(
        "pages 32, rows 4",
        "A 9 +2 \n B 4 +2 \n C 4 +2 prio 1 \n step \n D 6 +2 prio 2 \n run",
        expect![[r#"
            run C 0..4; hold A B; free 31 cached 0
            run D 0..3, C 4; hold A B; free 30 cached 1
              C: Length
            run D 3..6, B 0; hold A; free 28 cached 1
            run D 6, B 1..4; hold A; free 29 cached 2
              D: Length
            run A 0..3, B 4; free 28 cached 3
              B: Length
            run A 3..7; free 27 cached 3
            run A 7..9; free 26 cached 3
            run A 9; free 27 cached 5
              A: Length
        "#]],
    );
}

#[test]
fn under_pressure_the_youngest_loses_its_pages_and_comes_back() {
    check(
        "pages 6, no cache",
        "A 8 +9 \n B 8 +9 \n run",
        expect![[r#"
            run A 0..8, B 0..8; free 2 cached 0
            run A 8, B 8; free 0 cached 0
            run A 9, B 9; free 0 cached 0
            run A 10, B 10; free 0 cached 0
            run A 11, B 11; free 0 cached 0
            run A 12; hold B; free 2 cached 0
            run A 13; hold B; free 2 cached 0
            run A 14; hold B; free 2 cached 0
            run A 15; hold B; free 6 cached 0
              A: Length
            run B 0..13; free 2 cached 0
            run B 13; free 2 cached 0
            run B 14; free 2 cached 0
            run B 15; free 6 cached 0
              B: Length
        "#]],
    );
}

#[test]
fn a_higher_priority_takes_pages_from_a_lower_one() {
    check(
        "pages 7, no cache",
        "A 10 +9 \n step \n B 8 +9 prio 1 \n run",
        expect![[r#"
        run A 0..10; free 4 cached 0
        run B 0..8, A 10; free 2 cached 0
        run B 8, A 11; free 1 cached 0
        run B 9, A 12; free 0 cached 0
        run B 10, A 13; free 0 cached 0
        run B 11, A 14; free 0 cached 0
        run B 12; hold A; free 3 cached 0
        run B 13; hold A; free 3 cached 0
        run B 14; hold A; free 3 cached 0
        run B 15; hold A; free 7 cached 0
          B: Length
        run A 0..16; free 3 cached 0
        run A 16; free 2 cached 0
        run A 17; free 7 cached 0
          A: Length
    "#]],
    );
}

#[test]
fn scores_are_delivered_once_with_a_limit_for_each_step() {
    check(
        "pages 16, scores 3",
        "A 10 +1 score 2 \n run",
        expect![[r#"
        run A 0..5; free 14 cached 0
        run A 5..8; free 14 cached 0
        run A 8..10; free 14 cached 2
          A: 7 scores from 2
          A: Length
    "#]],
    );
    check(
        "pages 16",
        "A 10 +0 \n run \n B 10 +0 like A 10 score 5 \n run",
        expect![[r#"
        run A 0..10; free 14 cached 2
          A: Length
        run B 4..10; free 14 cached 2
          B: 4 cached
          B: 4 scores from 5
          B: Length
    "#]],
    );
}

#[test]
fn a_failed_step_fails_its_requests_and_nobody_else() {
    check(
        "pages 8, rows 8",
        "A 8 +2 x2 \n B 5 +2 \n fail \n step \n run",
        expect![[r#"
            run A 0..3, B 0..5; free 8 cached 0
              A: the device failed: submit was made to fail
              B: the device failed: submit was made to fail
        "#]],
    );
}

#[test]
fn cancelling_frees_pages_at_once() {
    check(
        "pages 8, no cache",
        "A 10 +5 \n B 18 +5 \n step 2 \n cancel A \n step \n cancel B",
        expect![[r#"
        run A 0..10; hold B; free 5 cached 0
        run A 10; hold B; free 5 cached 0
        cancel A; free 8 cached 0
          A: Cancelled
        run B 0..16; free 4 cached 0
        cancel B; free 8 cached 0
          B: Cancelled
    "#]],
    );
}

#[test]
fn what_can_never_fit_is_refused() {
    check(
        "pages 4, no cache",
        "A 16 +1 \n B 15 +9 \n C 16 +0 \n run",
        expect![[r#"
        A refused: the prompt has 16 tokens, but prompt and answer together can have 16; shorten it or give the engine a larger context and more pages
        run A 0..15; hold B; free 4 cached 0
          A: ContextFull
        run B 0..16; free 4 cached 0
          B: Length
    "#]],
    );
    check(
        "pages 40, context 10",
        "A 10 +1 \n B 9 \n run",
        expect![[r#"
        A refused: the prompt has 10 tokens, but prompt and answer together can have 10; shorten it or give the engine a larger context and more pages
        run A 0..9; free 38 cached 2
          A: ContextFull
    "#]],
    );
}

#[test]
fn tenants_take_turns_and_each_keeps_its_order() {
    check(
        "sequences 1, no cache",
        "A 4 +1 by x \n B 4 +1 by x \n C 4 +1 by x \n D 4 +1 by y \n E 4 +1 by y \n F 4 +1 \n run",
        expect![[r#"
            run A 0..4; hold B C D E F; free 16 cached 0
              A: Length
            run D 0..4; hold B C E F; free 16 cached 0
              D: Length
            run F 0..4; hold B C E; free 16 cached 0
              F: Length
            run B 0..4; hold C E; free 16 cached 0
              B: Length
            run E 0..4; hold C; free 16 cached 0
              E: Length
            run C 0..4; free 16 cached 0
              C: Length
        "#]],
    );
}

#[test]
fn a_tenant_with_long_prompts_and_answers_gets_fewer_turns() {
    check(
        "sequences 1, no cache",
        "G 4 +1 by y \n A 12 +4 by x \n step 3 \n B 4 +1 by x \n C 4 +1 by y \n D 4 +1 by y \n E 4 +1 by y \n F 4 +1 by y \n run",
        expect![[r#"
            run A 0..4; hold B; free 16 cached 0
              A: Length
            run B 0..12; free 13 cached 0
            run B 12; free 12 cached 0
            run B 13; hold C D E F G; free 12 cached 0
            run B 14; hold C D E F G; free 16 cached 0
              B: Length
            run D 0..4; hold C E F G; free 16 cached 0
              D: Length
            run C 0..4; hold E F G; free 16 cached 0
              C: Length
            run E 0..4; hold F G; free 16 cached 0
              E: Length
            run F 0..4; hold G; free 16 cached 0
              F: Length
            run G 0..4; free 16 cached 0
              G: Length
        "#]],
    );
}

#[test]
fn a_tenant_that_was_away_has_saved_up_nothing() {
    check(
        "sequences 1, no cache",
        "A 8 +1 by x \n B 8 +1 by x \n C 8 +1 by x \n step 2 \n D 4 +1 by y \n E 4 +1 by y \n F 4 +1 by y \n run",
        expect![[r#"
            run A 0..8; hold B C; free 16 cached 0
              A: Length
            run B 0..8; hold C; free 16 cached 0
              B: Length
            run C 0..8; hold D E F; free 16 cached 0
              C: Length
            run D 0..4; hold E F; free 16 cached 0
              D: Length
            run E 0..4; hold F; free 16 cached 0
              E: Length
            run F 0..4; free 16 cached 0
              F: Length
        "#]],
    );
}

#[test]
fn tenants_do_not_outrank_priorities() {
    check(
        "sequences 1, no cache",
        "A 4 +1 by x \n B 4 +1 by x prio 1 \n C 4 +1 by y \n D 4 +1 by x prio 1 \n run",
        expect![[r#"
            run B 0..4; hold D A C; free 16 cached 0
              B: Length
            run D 0..4; hold A C; free 16 cached 0
              D: Length
            run C 0..4; hold A; free 16 cached 0
              C: Length
            run A 0..4; free 16 cached 0
              A: Length
        "#]],
    );
}

#[test]
fn who_has_waited_for_long_rises() {
    check(
        "sequences 1, no cache, wait 3",
        "A 2 +1 prio 1 \n B 2 +1 \n C 2 +1 prio 1 \n D 2 +1 prio 1 \n E 2 +1 prio 1 \n F 2 +1 prio 1 \n run",
        expect![[r#"
            run A 0..2; hold C D E F B; free 16 cached 0
              A: Length
            run C 0..2; hold D E F B; free 16 cached 0
              C: Length
            run D 0..2; hold E F B; free 16 cached 0
              D: Length
            run B 0..2; hold E F; free 16 cached 0
              B: Length
            run E 0..2; hold F; free 16 cached 0
              E: Length
            run F 0..2; free 16 cached 0
              F: Length
        "#]],
    );
}

#[test]
fn a_deadline_ends_what_waits_and_keeps_what_there_is() {
    check(
        "sequences 1",
        "A 4 +9 in 5 \n B 4 +9 in 3 \n C 4 +2 x1 in 9 \n step 2 \n clock 4 \n step \n clock 6 \n run",
        expect![[r#"
            run A 0..4; hold B C; free 15 cached 0
            run A 4; hold B C; free 14 cached 0
            clock; free 14 cached 0
              B: the deadline passed before the request could start
            run A 5; hold C; free 14 cached 0
            clock; free 15 cached 1
              A: DeadlineExceeded
            run C 0..4; free 14 cached 1
            run C 4; free 14 cached 2
              C: Length
        "#]],
    );
}

#[test]
fn embeddings_bound_chunks_and_what_the_cache_is_used_for() {
    check(
        "pages 32, rows 8, scores 3",
        "A 9 +0 \n run \n B 9 +0 like A 9 mean \n run \n C 9 +0 like A 9 last \n run \n D 9 +2 like A 9 last \n run",
        expect![[r#"
            run A 0..8; free 30 cached 0
            run A 8; free 30 cached 2
              A: Length
            run B 0..3; free 29 cached 2
            run B 3..6; free 28 cached 2
            run B 6..9; free 30 cached 2
              B: an embedding of 3
              B: Length
            run C 8; free 30 cached 2
              C: 8 cached
              C: an embedding of 3
              C: Length
            run D 8; free 29 cached 0
              D: 8 cached
              D: an embedding of 3
            run D 9; free 30 cached 2
              D: Length
        "#]],
    );
}

/// All rows of a text of an encoder are in one step, in both directions.
#[test]
fn texts_of_encoders_are_computed_whole() {
    check(
        "encoder, pages 32, rows 16, scores 16",
        "A 9 +0 mean \n B 12 +0 mean \n C 5 +0 last \n D 3 +1 mean \n E 3 +0 \n run",
        expect![[r#"
            D refused: `max_tokens` must be 0: this model is an encoder, which embeds texts and writes none
            E refused: `embedding` is all that an encoder computes
            run A 0..9, C 0..5; hold B; free 32 cached 0
              A: an embedding of 3
              A: Length
              C: an embedding of 3
              C: Length
            run B 0..12; free 32 cached 0
              B: an embedding of 3
              B: Length
        "#]],
    );
}
