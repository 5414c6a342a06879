//! Pages that sequences share: the prefix cache, branches, windows. [Scripts](super::script) with results.

use expect_test::expect;

use super::script::check;

#[test]
fn what_was_preempted_comes_back_from_the_cache() {
    check(
        "pages 6",
        "A 8 +9 \n B 8 +9 \n run",
        expect![[r#"
            run A 0..8, B 0..8; free 2 cached 0
            run A 8, B 8; free 0 cached 0
            run A 9, B 9; free 0 cached 0
            run A 10, B 10; free 0 cached 0
            run A 11, B 11; free 0 cached 0
            run A 12; hold B; free 0 cached 2
            run A 13; hold B; free 0 cached 2
            run A 14; hold B; free 0 cached 2
            run A 15; hold B; free 0 cached 6
              A: Length
            run B 8..13; free 0 cached 2
            run B 13; free 0 cached 2
            run B 14; free 0 cached 2
            run B 15; free 0 cached 6
              B: Length
        "#]],
    );
}

#[test]
fn a_prompt_takes_every_block_it_shares_and_computes_at_least_one_token() {
    check(
        "pages 16",
        "A 13 +1 \n run \n B 13 +1 like A 13 \n run \n C 12 +1 like A 12 \n run \n D 11 +1 like A 7 \n run",
        expect![[r#"
            run A 0..13; free 13 cached 3
              A: Length
            run B 12; free 13 cached 3
              B: 12 cached
              B: Length
            run C 8..12; free 13 cached 3
              C: 8 cached
              C: Length
            run D 4..11; free 12 cached 4
              D: 4 cached
              D: Length
        "#]],
    );
}

#[test]
fn a_block_that_somebody_computes_is_waited_for() {
    check(
        "pages 32, rows 8",
        "A 15 +1 \n B 14 +1 like A 13 \n C 5 +1 \n run",
        expect![[r#"
            run A 0..3, C 0..5; hold B; free 30 cached 1
              C: Length
            run A 3..11; hold B; free 28 cached 1
            run A 11..15; hold B; free 28 cached 4
              A: Length
            run B 12..14; free 28 cached 4
              B: 12 cached
              B: Length
        "#]],
    );
}

#[test]
fn unused_cached_blocks_make_room_the_longest_unused_first() {
    check(
        "pages 6",
        "A 8 +1 \n run \n B 8 +1 \n run \n C 12 +1 \n run \n D 5 +1 like B 5 \n run",
        expect![[r#"
        run A 0..8; free 4 cached 2
          A: Length
        run B 0..8; free 2 cached 4
          B: Length
        run C 0..12; free 0 cached 6
          C: Length
        run D 4; free 1 cached 5
          D: 4 cached
          D: Length
    "#]],
    );
}

#[test]
fn water_marks_keep_pages_free() {
    check(
        "pages 10, water 0.3-0.6",
        "A 12 +1 \n run \n B 12 +1 \n run \n C 20 +1 \n run",
        expect![[r#"
        run A 0..12; free 7 cached 3
          A: Length
        run B 0..12; free 4 cached 6
          B: Length
        run C 0..16; free 6 cached 0
        run C 16..20; free 5 cached 5
          C: Length
    "#]],
    );
}

#[test]
fn branches_share_the_prompt_and_copy_its_partial_tail() {
    check(
        "pages 16",
        "A 6 +4 x3 \n run",
        expect![[r#"
        run A 0..6; free 14 cached 0
        run A 6, A.1 6, A.2 6; copy 2>3; copy 2>4; free 12 cached 0
        run A 7, A.1 7, A.2 7; free 12 cached 0
        run A 8, A.1 8, A.2 8; free 12 cached 4
          A: Length
          A.1: Length
          A.2: Length
    "#]],
    );
    check(
        "pages 16, no cache",
        "A 8 +2 x2 \n run",
        expect![[r#"
        run A 0..8; free 14 cached 0
        run A 8, A.1 8; free 16 cached 0
          A: Length
          A.1: Length
    "#]],
    );
}

#[test]
fn branches_without_a_place_wait_and_find_the_prompt_later() {
    check(
        "pages 32, sequences 4",
        "A 4 +3 x2 \n B 4 +2 x3 \n C 4 +2 \n run",
        expect![[r#"
            run A 0..4, B 0..4, C 0..4; hold B.1; free 29 cached 0
            run A 4, A.1 4, B 4, C 4; hold B.1; free 27 cached 2
              B: Length
              C: Length
            run A 5, A.1 5, B.1 0..4; free 28 cached 3
              A: Length
              A.1: Length
            run B.1 4, B.2 4; free 29 cached 3
              B.1: Length
              B.2: Length
        "#]],
    );
}

#[test]
fn windows_release_what_no_later_row_sees() {
    check(
        "pages 12, windows 6, rows 5, no cache",
        "A 20 +4 \n run",
        expect![[r#"
        run A 0..5; free 10 cached 0
        run A 5..10; free 10 cached 0
        run A 10..15; free 10 cached 0
        run A 15..20; free 10 cached 0
        run A 20; free 10 cached 0
        run A 21; free 10 cached 0
        run A 22; free 12 cached 0
          A: Length
    "#]],
    );
    check(
        "pages 24, windows -/4, rows 5",
        "A 14 +3 \n run",
        expect![[r#"
        run A 0..5; free 20 cached 0
        run A 5..10; free 18 cached 1
        run A 10..14; free 16 cached 2
        run A 14; free 16 cached 3
        run A 15; free 16 cached 8
          A: Length
    "#]],
    );
}

#[test]
fn behind_a_window_only_visible_blocks_are_needed_for_a_hit() {
    // B takes the pages of A's first blocks; C needs only the last block that it shares with A.
    check(
        "pages 6, windows 5",
        "A 17 +1 \n run \n B 16 +1 \n run \n C 19 +1 like A 16 \n run",
        expect![[r#"
            run A 0..16; free 2 cached 3
            run A 16; free 2 cached 4
              A: Length
            run B 0..16; free 0 cached 6
              B: Length
            run C 16..19; free 1 cached 5
              C: 16 cached
              C: Length
        "#]],
    );
}
