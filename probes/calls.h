/* SPDX-License-Identifier: (GPL-2.0-only OR BSD-3-Clause) */
/*
 * What calls.bpf.c and user space share: how a call of an engine is read (written by user
 * space from the catalogue, probes/<engine>.yaml), and what is added up of it.
 *
 * User space takes the types from the object's BTF.
 */
#ifndef PROFINFER_CALLS_H
#define PROFINFER_CALLS_H

#define CALL_FIELDS 10
#define CALL_STEPS 4
#define CALL_SUMS 3
#define CALL_TEXT 64
#define CALL_ARGS 8
#define MAX_CALLS 512
#define MAX_TABLES 8
#define TABLE_VALUES 64

enum call_use {			/* bits: what a field is for */
	CU_LABEL = 1,		/* calls are told apart by it */
	CU_SUM = 2,		/* added up */
	CU_BIND = 4,		/* an object begins: it gets a new subject */
	CU_SUBJECT = 8,		/* an object: its subject takes the place of the address */
	CU_ALIAS = 16,		/* another name of the object in field `other` */
	CU_PENDS = 32,		/* done when this object is (an array of them: `other` says how many) */
	CU_AWAITS = 64,		/* this object is done when the call returns */
	CU_FORGET = 128,	/* the object ends */
	CU_OPENS = 256,		/* calls on this object are only recorded from here on */
	CU_WITHIN = 512,	/* and such a call is one of them while that lasts */
	CU_CLOSES = 1024,	/* until here; the object in field `other` then holds them */
	CU_HOLDS = 2048,	/* the number that the object holds is what is added up */
	CU_TEXT = 4096,		/* a text */
	CU_PRODUCT = 8192,	/* of an array of int64: `other` says how many there are */
	CU_TAKES = 16384,	/* what the objects of an array hold is added up, and then they hold 0 */
	CU_SETS = 32768,	/* the subject of the object holds the value of `other` */
	CU_OWNER = 131072,	/* the value is the subject of the object; absent where it has none */
	CU_HELD = 65536,	/* the value is what the subject of the object holds */
	CU_TIMES = 1048576,	/* the value is multiplied by that of `other` */
	CU_FIRST = 262144,	/* the value is 1 the first time since the object began, else 0 */
	CU_SWITCH = 524288,	/* the value is 1 where another object had its turn last, else 0 */
};

enum call_source {
	CS_ARG = 0,		/* argument 0 to 7, in a register */
	CS_RETURN = 16,
	CS_STACK = 17,		/* at `stack` bytes above the stack pointer at the entry */
	CS_AROUND = 18,		/* 1 inside a call of group 0, else 0 */
};

enum call_when {
	CW_ENTRY = 0,
	CW_RETURN = 1,
};

enum call_field_flag {
	CF_SIGNED = 1,
	CF_SIZED = 2,		/* every structure on the way begins with its own size */
	CF_INLINE = 4,		/* the text is in the structure, not behind a pointer */
	CF_ALWAYS = 8,		/* at the return, also when the call failed */
	CF_SIZED_FIRST = 32,	/* as CF_SIZED, but only the argument's own structure */
	CF_LAST = 64,		/* not added up: the last value counts */
	CF_ELSE_ONE = 128,	/* of an array: one, where `other` is not known */
	CF_NONZERO = 16,	/* the effect only takes place where the value is not 0 */
};

enum call_ok {			/* which return value means success */
	CO_VOID = 0,
	CO_ZERO = 1,		/* an error number else */
	CO_NULL = 2,		/* an error object else */
	CO_NONNULL = 3,
	CO_NOT_NEGATIVE = 4,
};

enum call_has {
	CH_ENTRY = 1,		/* fields that are read at the entry, and so on */
	CH_RETURN = 2,
	CH_PENDS = 4,
	CH_TEXT = 8,
};

struct call_field {
	__u32 use;
	__u8 source, when, size, steps;
	__u8 flags, shift, slot, other;	/* other: 1 + index of a field, 0: none */
	__u8 kind;			/* of the object */
	__u8 table;			/* 1 + index in "tables": bits per element by value of `scale` */
	__u8 scale;			/* 1 + index of a field */
	__u8 only_if;			/* 1 + index of a field that must not be 0 */
	__u32 stack;			/* of CS_STACK; else of CU_PRODUCT how many there are, 0: as `other` says */
	__u32 step[CALL_STEPS];
};

struct call_conf {
	__u32 n_fields;
	__u8 ok;			/* enum call_ok */
	__u8 group;			/* calls of a group inside each other: the outermost counts; 0: around others */
	__u8 ok_width;			/* bytes of the return value */
	__u8 has;			/* enum call_has: what may be skipped where it is not */
	__u16 set;			/* of calls that share a limit: an engine's */
	__u16 family;			/* of calls that come and go together: those of one name */
	struct call_field fields[CALL_FIELDS];
};

struct call_table {
	__u8 bits[TABLE_VALUES];
};

enum call_limit_flag {
	CT_RECORDS = 1,			/* a record of each call, too */
	CT_WHOLE = 2,			/* a limit is only looked at when a call of group 0 begins */
};

/* What watching may cost is kept here, at once, and not when user space finds the time: a hit that is
 * over the limit only says that it was. Of a process and a set, written by user space alone. */
struct call_limit_key {
	__u32 tgid;
	__u32 set;
};

struct call_limit {
	__u64 limit_ns;			/* what may have been spent in all; rarer calls go on ... */
	__u64 hard_ns;			/* ... until this */
	__u32 price_ns[4];		/* of a hit: watched, stepped, over the limit, both */
	__u32 flags;			/* enum call_limit_flag */
	__u32 reserved;
};

/* Of the same, written by the programs. */
struct call_account {
	__u64 spent_ns;
	__u32 live;			/* the last call of group 0 began within the limit */
	__u32 turns;			/* 1: there was one */
};

struct call_family_key {
	__u32 tgid;
	__u32 family;
};

struct call_family {
	__u64 hits;			/* entries that were looked at */
	__u64 skipped;			/* and those over the limit */
	__u64 spent_ns;
	__u64 closed_at;		/* since when none was looked at, 0: they are */
	__u64 unwatched_ns;		/* before that */
};

enum call_state {
	CK_OUTERMOST = 0,
	CK_INNER = 1,			/* inside another call of its group */
	CK_RECORDED = 2,		/* into a graph, not executed */
	CK_OVERFLOW = 3,		/* no room for more labels: this stands for them */
};

struct call_key {
	__u64 label;
	__u32 tgid;
	__s32 status;
	__u16 call;
	__u8 state;			/* enum call_state */
	__u8 reserved0;
	__u32 reserved1;
};

struct call_sum {
	__u64 count, ns, max_ns;
	__u64 untimed;			/* of `count`: no return probe was possible */
	__u64 done, done_ns;		/* whose completion was seen; entry to then */
	__u64 sum[CALL_SUMS];
	__u64 value[CALL_FIELDS];	/* of the first call with this label */
	__u32 present;
	__u32 reserved;
	char text[CALL_TEXT];
};

struct call_record {
	__u64 ts, ns;			/* ns: ~0 where no return was seen */
	__u64 label;
	__u64 sum[CALL_SUMS];
	__u32 tgid, tid;
	__s32 status;
	__u16 call;
	__u8 state;
	__u8 depth;			/* calls around it, of any group */
};

enum call_stat {
	CALL_ST_HITS,
	CALL_ST_LOST_RECORDS,
	CALL_ST_THREADS_FULL,		/* no room for a thread's state */
	CALL_ST_LABELS_FULL,		/* no room for a label: counted under none */
	CALL_ST_TOO_DEEP,
	CALL_ST_LOST_RETURN,		/* a return without its entry */
	CALL_ST_UNRETURNED,		/* an entry without its return (longjmp, exit) */
	CALL_ST_SKIPPED_RETURN,		/* no return probe: what lay on the stack was no code */
	CALL_ST_UNREAD,			/* fields that could not be read */
	CALL_ST_COUNT,
};

#endif
